"""What an agent counts and measures: tables of metrics, their values, where the time goes (goodput), and metrics of scripts."""
