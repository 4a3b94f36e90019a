"""Property-list templates for running omlxd as a background service."""
