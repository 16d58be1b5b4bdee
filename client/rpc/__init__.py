"""The site's service: site.proto and what is generated from it."""
