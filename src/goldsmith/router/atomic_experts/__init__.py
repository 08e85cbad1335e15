"""router.atomic_experts: very many experts of one hidden unit each."""
