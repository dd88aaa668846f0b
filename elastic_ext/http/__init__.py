"""How an agent serves its metrics and status: pages, TLS and passwords, and the files by which Prometheus finds it."""
