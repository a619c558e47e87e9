"""Expert-aware scheduling for mixture-of-experts models: predict each request's load on the devices, and use it.

What lives here is pure and needs numpy, which the base install does not have; so nothing outside this folder imports
it before a worker has said that its model routes tokens to experts (`headway[experts]`, or `headway[worker]`).

`placement` says which devices hold an expert, `predictor` learns what a request will ask of them from what others did,
`worth` measures whether using that pays, `composer` chooses who runs together, `shedding` who must be refused,
`decode` follows those who run.
"""
