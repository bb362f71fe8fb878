"""The live cache: what an inference process keeps of one sequence, layer by layer.

A `plan` says what each layer keeps, `rows` where stored rows lie, `layers` what can be done with them,
`model` what must be atomic over all of them. Imports neither store nor client: `kvstore.bridge` knows both.
"""
