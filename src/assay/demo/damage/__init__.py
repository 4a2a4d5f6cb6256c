"""Ways in which a checkpoint breaks in practice, done to a copy on purpose, the same each time for one seed."""

from assay.demo.damage.registry import DAMAGES, Damage, damage_checkpoint

__all__ = ["DAMAGES", "Damage", "damage_checkpoint"]
