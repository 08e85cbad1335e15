"""router.atomic_experts: a layer of very many experts, each with one hidden unit."""
