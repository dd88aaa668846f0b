"""The status of a job: what nodes report, the document for people and programs, and posts to Kubeflow Trainer."""
