"""temporary"""
from agentrl.generation.local import LocalGenerator
def make_generator(model, args): return LocalGenerator(model)
