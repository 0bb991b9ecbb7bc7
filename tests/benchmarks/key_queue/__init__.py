"""How fast calls of one key run one after another, and what others see of it."""
