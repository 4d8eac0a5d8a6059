"""Choosing rows that differ. Vectors are float32 [rows, dimensions]; answers are row numbers, in the order taken."""

import numpy as np

from agentrl.datastore.optional import optional


def k_center(vectors: np.ndarray, n: int) -> list[int]:
    """Farthest-first traversal (Gonzalez, 1985): at most twice the best possible covering radius.

    Starts from row 0, so give the best row first. O(rows x n).
    """
    taken = [0]
    distance = ((vectors - vectors[0]) ** 2).sum(1)
    while len(taken) < min(n, len(vectors)):
        distance[taken[-1]] = -1.0  # equal rows are at distance 0 and are taken last, each once
        farthest = int(distance.argmax())
        taken.append(farthest)
        distance = np.where(distance < 0, distance, np.minimum(distance, ((vectors - vectors[farthest]) ** 2).sum(1)))
    return taken


def cluster_balanced(vectors: np.ndarray, n: int, clusters: int, seed: int) -> list[int]:
    """Take rows from k-means clusters in turn, from each in the order given: all rows of small clusters, the first of
    large ones."""
    kmeans = optional("sklearn.cluster", "retrieval").KMeans
    distinct = len(np.unique(vectors, axis=0))
    labels = kmeans(min(clusters, distinct), n_init=1, random_state=seed).fit_predict(vectors)
    members = [list(np.flatnonzero(labels == label)) for label in range(labels.max() + 1)]
    taken: list[int] = []
    for turn in range(max(len(rows) for rows in members)):
        taken += [int(rows[turn]) for rows in members if turn < len(rows)]
    return taken[:n]
