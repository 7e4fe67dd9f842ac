"""The two things that cross between the groups: finished rollouts (ring) and weights.

Nothing here knows a model, a loss or an engine.
"""
