"""Everything that knows Megatron: flags, groups, core attention, spec swap, pretraining entry, CPU ranks."""
