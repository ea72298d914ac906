"""Addresses of tables: paths and URIs, remote file systems with retries, and a disk cache."""
