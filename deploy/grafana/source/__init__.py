"""Makes the dashboards: `python -m deploy.grafana.source` writes dashboards/*.json anew."""
