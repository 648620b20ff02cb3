"""Makes two pages from the records: docs/evidence.html with its pictures, and docs/reports.md."""
