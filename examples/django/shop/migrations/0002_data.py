"""Two products, and the periodic task that repairs their listings each minute."""

import json

from django.db import migrations


def create(apps, schema_editor):
    product_model = apps.get_model("shop", "Product")
    listing_model = apps.get_model("shop", "Listing")
    for name in ("Teapot", "Kettle"):
        listing_model.objects.create(product=product_model.objects.create(name=name))
    intervals = apps.get_model("django_celery_beat", "IntervalSchedule").objects
    minute, _ = intervals.get_or_create(every=60, period="seconds")
    apps.get_model("django_celery_beat", "PeriodicTask").objects.create(
        name="repair the listings",
        task="shop.tasks.publish_all_listings",
        interval=minute,
        # No tick is published while the last one is queued or runs.
        headers=json.dumps({"singleton": {"unique": "until_done"}}),
    )


class Migration(migrations.Migration):
    dependencies = [
        ("shop", "0001_initial"),
        ("django_celery_beat", "0019_alter_periodictasks_options"),
    ]
    operations = [migrations.RunPython(create, migrations.RunPython.noop)]
