"""What a training script may call. Except `accumulation`, `health_barrier` and `ElasticSampler`, it does nothing unless our agent
runs the script.

`huggingface` and `lightning` hold the callbacks for those libraries. Importing this package does not import torch.
"""

from elastic_ext.base import log_records
from elastic_ext.training.all_ranks import Accumulation, accumulation, health_barrier
from elastic_ext.training.progress import Phase, phase, report, report_flops, report_progress, report_tokens, report_total_steps
from elastic_ext.training.sampler import ElasticSampler
from elastic_ext.training.saves import report_save_failed, report_saved, resume_from, resume_step, save_dir, save_requested

__all__ = [
    "Accumulation", "ElasticSampler", "Phase", "accumulation", "health_barrier", "phase", "report", "report_flops",
    "report_progress", "report_save_failed", "report_saved", "report_tokens", "report_total_steps", "resume_from", "resume_step",
    "save_dir", "save_requested",
]  # fmt: skip

log_records.install()  # scripts may import from here without getting a name from the package elastic_ext, which would install it
