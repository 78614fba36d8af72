"""What a wheel holds beside our packages: instruments and migrations, as data of `researcher.shipped` (foundation.paths.shipped)."""

from __future__ import annotations

from setuptools import find_namespace_packages, setup

SHIPPED = {"researcher.shipped.studies": "studies", "researcher.shipped.migrations": "db/migrations"}
CACHES = ["*__pycache__*"]

places = dict(SHIPPED)
for name, folder in SHIPPED.items():
    for within in find_namespace_packages(folder, exclude=CACHES):
        places[f"{name}.{within}"] = f"{folder}/{within.replace('.', '/')}"

setup(
    packages=[*find_namespace_packages(include=["foundation*", "swarm*", "researcher*"], exclude=CACHES), *places],
    package_dir=places,
)
