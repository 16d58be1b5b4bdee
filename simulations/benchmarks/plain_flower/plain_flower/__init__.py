"""A Flower app as tutorials write it."""
