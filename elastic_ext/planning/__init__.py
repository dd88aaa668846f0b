"""What a job can expect before it runs: where its time will go, and the settings that follow."""
