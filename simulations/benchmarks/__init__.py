"""Benchmarks: each module is a command that measures one promise and ends with a BAR line."""
