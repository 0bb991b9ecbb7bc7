"""The addresses."""

from django.contrib import admin
from django.urls import path

from . import views

urlpatterns = [
    path("admin/", admin.site.urls),
    path("products/<int:product_id>/", views.show),
    path("products/<int:product_id>/change/", views.change),
]
