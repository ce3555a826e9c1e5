-- The truth: what each job was asked to do and what happened, in order.
CREATE TABLE jobs (
    id TEXT PRIMARY KEY,
    spec TEXT NOT NULL,
    created_at TEXT NOT NULL,                -- UTC, ISO 8601
    status TEXT NOT NULL DEFAULT 'running',  -- running, finished, aborted
    decision TEXT
);
CREATE TABLE events (
    job TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    seq INTEGER NOT NULL CHECK (seq >= 0),
    body TEXT NOT NULL,
    PRIMARY KEY (job, seq)
) WITHOUT ROWID;
