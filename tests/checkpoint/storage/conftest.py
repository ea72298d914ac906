"""Fixtures of the tests of stores."""

from object_storage import azure_bucket, gcs_bucket, s3_bucket  # noqa: F401
