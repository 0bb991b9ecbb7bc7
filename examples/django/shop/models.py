"""Products, and what a marketplace shows of them."""

from django.db import models


class Product(models.Model):
    """A product in the shop's own warehouse."""

    name = models.CharField(max_length=100)
    stock = models.PositiveIntegerField(default=0)


class Listing(models.Model):
    """What the marketplace shows. Its stock follows the product's, some seconds later."""

    product = models.OneToOneField(Product, models.CASCADE, primary_key=True)
    stock = models.PositiveIntegerField(default=0)
    #: The fencing token of the last write: the lease of each later holder has a higher one.
    fence = models.PositiveBigIntegerField(default=0)
