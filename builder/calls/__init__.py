"""What the importer writes into a Relax module for the kernels to read: calls that stay one node, and spans.

The importer emits such a call where TVM's front end has no operator; a pass of `builder.kernels` finds it by
`of`, and writes the kernel. Neither room imports the other.
"""
