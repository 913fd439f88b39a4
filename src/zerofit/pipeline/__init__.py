"""Pipeline parallelism over DeepSpeed's PipelineModule (recipes/pipeline.py)."""
