"""vLLM on the agent: an external connector, `kv_connector_module_path` = `disagg_agent.engines.vllm.connector`.

Two halves, as vLLM has them: the scheduler's decides (`decisions`, pure), every worker's acts (`worker`).
`connector` only adapts vLLM's classes to them.
"""
