"""A discrete-event simulator: the schedulers and the window controller of the runtime under a virtual clock.

Nothing here imports torch.
"""
