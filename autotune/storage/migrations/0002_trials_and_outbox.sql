-- Derived from the events, for queries and for later jobs that learn from older ones. The contents are
-- addressed by their hash, so that a hundred jobs on one model hold it once.
CREATE TABLE workloads (
    id TEXT PRIMARY KEY,
    model_id TEXT NOT NULL,
    body TEXT NOT NULL
);
CREATE TABLE clusters (
    id TEXT PRIMARY KEY,
    body TEXT NOT NULL
);
CREATE TABLE strategies (
    id TEXT PRIMARY KEY,
    body TEXT NOT NULL
);
CREATE TABLE trials (
    job TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    strategy_id TEXT NOT NULL,
    plan_id TEXT,
    role TEXT NOT NULL,
    workload_id TEXT NOT NULL REFERENCES workloads (id),
    cluster_id TEXT NOT NULL REFERENCES clusters (id),
    status TEXT NOT NULL,                    -- measured, or the kind of failure
    median_s REAL,
    step_s TEXT,                             -- raw, [rank][step]
    message TEXT,
    elapsed_s REAL NOT NULL,
    environment TEXT NOT NULL,               -- software versions
    PRIMARY KEY (job, number)
) WITHOUT ROWID;
CREATE INDEX trials_by_workload ON trials (workload_id, cluster_id);

-- What still has to reach the tracking server, in order. Written with the event in one transaction.
CREATE TABLE outbox (
    job TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    position INTEGER NOT NULL,
    kind TEXT NOT NULL,                      -- start, event, model, artifact, finish
    body TEXT NOT NULL,
    state TEXT NOT NULL DEFAULT 'waiting',   -- waiting, sent, rejected
    message TEXT,
    PRIMARY KEY (job, position)
) WITHOUT ROWID;
CREATE INDEX outbox_waiting ON outbox (job, position) WHERE state = 'waiting';
