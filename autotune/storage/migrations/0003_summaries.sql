-- Derived from the events, for lists of trials: no step times, no strategies. Of a store of an older
-- version, each job is derived when its summary is read for the first time.
CREATE TABLE event_summaries (
    job TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    seq INTEGER NOT NULL,
    kind TEXT NOT NULL,                      -- of the event
    body TEXT,                               -- a trial's summary
    PRIMARY KEY (job, seq)
) WITHOUT ROWID;
CREATE TABLE proposals (
    job TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    strategy_id TEXT NOT NULL,
    origin TEXT NOT NULL,                    -- of the first proposal
    words TEXT NOT NULL,                     -- what the strategy does
    PRIMARY KEY (job, strategy_id)
) WITHOUT ROWID;
