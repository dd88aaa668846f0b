"""What happens to a job, one record for each event: their table, recoveries, and where they are written."""
