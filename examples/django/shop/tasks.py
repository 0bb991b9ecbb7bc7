"""The tasks: each product is published by one worker at a time."""

from django.db.models import F

from celery_singleton_lock import current_lease, singleton_task

from .models import Listing, Product


@singleton_task(
    key="product:{product_id}", unique="until_start", acks_late=True, reject_on_worker_lost=True
)
def publish_listing(product_id: int) -> bool:
    """Show the product's stock on the marketplace.

    ``unique="until_start"``: however many requests change the stock, one message waits, and it
    reads the stock after the last of them.
    """
    stock = Product.objects.values_list("stock", flat=True).get(pk=product_id)
    # A worker that was suspended until its lease had passed to another has the lower fence.
    listing = Listing.objects.filter(product=product_id, fence__lt=current_lease().fence)
    return listing.update(stock=stock, fence=current_lease().fence) == 1


@singleton_task
def publish_all_listings() -> int:
    """Repair listings that differ: a periodic task in the database sends this one."""
    wrong = Listing.objects.exclude(stock=F("product__stock")).values_list("product", flat=True)
    for product_id in wrong:
        publish_listing.delay(product_id)
    return len(wrong)
