"""Clients that train and compress in other processes, of this machine or of a Ray cluster.

A worker receives the model of a round, trains a slice of the cohort with the same trainers as `LocalEngine`, compresses
the updates and returns encoded uploads: dense updates do not travel. Residuals and memories travel to the worker and
back, because the server's store is the only copy that outlives a worker: any worker can train any client, and a slice
whose worker has died is trained again with the same result.
"""

from gluefl.clients.remote.messages import Broadcast, Kept, Reply, UploadingEngine

__all__ = ["Broadcast", "Kept", "Reply", "UploadingEngine"]
