"""Campaigns: series of trials of any strategies, written into a dataset's domain as they end.

A campaign trains one model on one cluster (`setups.Setup`). `session.trial_session` starts the
script's ranks and yields a `TrialSession`, which runs and keeps trials; `tuning_jobs` lets a tuner
choose them. A finished trial is on disk before the next one starts. A campaign that was stopped
continues in the same folder, and `retries.persevere` restarts a world that failed.

    from autotune.jobs.campaign.session import TrialLength, trial_session
    from autotune.jobs.campaign.setups import generated_setup

    setup = generated_setup("vgg", Path("four_hosts.yaml"))
    length = TrialLength(warmup_steps=2, timed_steps=6)
    with trial_session(Path("trials") / setup.name, setup, length, print) as session:
        session.candidate("mine", strategy)
"""
