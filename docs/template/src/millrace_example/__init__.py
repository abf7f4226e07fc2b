"""Workloads for Millrace."""
