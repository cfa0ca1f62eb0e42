"""The twins: CuTe DSL kernels that serve the stages of `reference` on sm_90a, sm_100a and sm_103a."""
