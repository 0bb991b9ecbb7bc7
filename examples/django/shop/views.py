"""The views: stock changes in a transaction, and the marketplace follows once it is committed."""

from django import forms
from django.db import IntegrityError, transaction
from django.db.models import F
from django.http import Http404, HttpRequest, JsonResponse
from django.shortcuts import get_object_or_404
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_GET, require_POST

from .models import Product
from .tasks import publish_listing


class Change(forms.Form):
    """What a client may ask for."""

    by = forms.IntegerField(min_value=-1_000_000, max_value=1_000_000)


@require_GET
def show(request: HttpRequest, product_id: int) -> JsonResponse:
    """The product's stock, and that of its listing."""
    product = get_object_or_404(Product.objects.select_related("listing"), pk=product_id)
    return JsonResponse({"stock": product.stock, "listed": product.listing.stock})


@csrf_exempt  # for curl; an API of yours authenticates its clients
@require_POST
def change(request: HttpRequest, product_id: int) -> JsonResponse:
    """Add ``by`` to the stock. A stock below 0 is refused, and nothing is published then."""
    form = Change(request.POST)
    if not form.is_valid():
        return JsonResponse({"error": form.errors}, status=400)
    by = form.cleaned_data["by"]
    try:
        with transaction.atomic():
            publish_listing.delay_on_commit(product_id)
            if not Product.objects.filter(pk=product_id).update(stock=F("stock") + by):
                raise Http404
    except IntegrityError:
        return JsonResponse({"error": "not enough in stock"}, status=409)
    return JsonResponse({"changed": by})
