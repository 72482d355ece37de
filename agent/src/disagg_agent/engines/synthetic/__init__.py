"""An engine without a model: real memory in the declared layout, every cell filled by a known function.

It serves the request flow of a real prefill/decode pair over HTTP, so that whatever drives a real engine drives
this one, and decode can check every byte that arrived.
"""
