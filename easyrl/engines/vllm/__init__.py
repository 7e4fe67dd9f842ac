"""The vLLM engine, on NVIDIA GPUs, Ascend NPUs and the CPU."""
