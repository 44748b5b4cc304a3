//! The load: producers, keyed adds, an operator and a janitor that call the SQL API and `WorkerUtils` all the time, and
//! remember what was acknowledged.

mod limits;

use crate::Failure;
use crate::check::{AddedEvent, AddedJob, CallError, Load};
use crate::record::{MILLISECOND, Nanos, lock, now};
use crate::worker::{FLAG, LIMITED, Payload, REPEATABLE, SCRIPTED};
use chrono::{TimeDelta, Utc};
use graphile_worker::{CleanupTask, Job, JobKeyMode, JobSpec, RawJobSpec, RescheduleJobOptions, WorkerUtils};
use serde_json::{Value, json};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{Connection, PgConnection, PgPool};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub(crate) const SCHEMA: &str = "graphile_worker";

/// Producers wait while more jobs than this are in the table.
const BACKLOG: i64 = 1200;

/// Queues that one producer fills, whose jobs never fail: they must run in order.
pub(crate) const STRICT_QUEUES: usize = 6;

/// Steps of our ledger (`migrate.rs` of the library): the SQL functions with the columns of `_rs_workers`, the indexes.
const FUNCTIONS_STEP: i32 = 22;
const INDEXES_STEP: i32 = 19;

/// How many ids the operator remembers.
const RECENT: usize = 200;

/// A part of the load that can be left out, to isolate a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Part {
    /// Keyed adds and their removal.
    Keyed,
    /// `reschedule_jobs`, `complete_jobs`, `permanently_fail_jobs`, `remove_job`.
    Operator,
    /// `cleanup` and `migrate`.
    Cleanup,
    /// Limits across all workers, and jobs under them.
    Limits,
}

pub(crate) struct Driver {
    options: PgConnectOptions,
    pub(crate) pool: PgPool,
    utils: WorkerUtils,
    load: Mutex<Load>,
    next_event: AtomicU64,
    backlog: AtomicI64,
    stop: AtomicBool,
    /// The largest batch for a strict queue.
    strict_batch: usize,
    /// Whether workers run the task in JavaScript.
    scripts: bool,
    /// Ids of the task `operated`: an operator may complete, fail and reschedule these.
    operated: Mutex<VecDeque<i64>>,
    /// Ids that an operator may only reschedule.
    movable: Mutex<VecDeque<i64>>,
    /// Held while a limit differs from its setting at the start: changes are made one after the other, so that their order is known.
    changing: tokio::sync::Mutex<()>,
}

impl Driver {
    pub(crate) fn new(url: &str, strict_batch: usize, scripts: bool) -> Result<Arc<Driver>, Failure> {
        let options: PgConnectOptions = url.parse()?;
        // No call of the driver may take this long, whatever the fleet and the faults do.
        let options = options.options([("statement_timeout", "30s")]);
        let pool = PgPoolOptions::new()
            .max_connections(14)
            .acquire_timeout(Duration::from_secs(10))
            .connect_lazy_with(options.clone());
        Ok(Arc::new(Driver {
            utils: WorkerUtils::new(pool.clone(), SCHEMA),
            options,
            pool,
            load: Mutex::default(),
            next_event: AtomicU64::new(1),
            backlog: AtomicI64::new(0),
            stop: AtomicBool::new(false),
            strict_batch,
            scripts,
            operated: Mutex::default(),
            movable: Mutex::default(),
            changing: tokio::sync::Mutex::default(),
        }))
    }

    /// A connection outside the pool.
    pub(crate) async fn connect(&self) -> sqlx::Result<PgConnection> {
        PgConnection::connect_with(&self.options).await
    }

    pub(crate) async fn migrate(&self) -> Result<(), Failure> {
        self.utils.migrate().await?;
        Ok(())
    }

    /// Starts all parts of the load. They end after [`Driver::stop`].
    pub(crate) fn start(self: &Arc<Self>, random: &mut fastrand::Rng, without: &[Part]) -> tokio::task::JoinSet<()> {
        let mut tasks = tokio::task::JoinSet::new();
        tasks.spawn(self.clone().watch_backlog());
        for _ in 0..2 {
            tasks.spawn(self.clone().produce(random.fork()));
        }
        for part in 0..2 {
            tasks.spawn(self.clone().fill_strict_queues(part, random.fork()));
        }
        for _ in 0..if without.contains(&Part::Keyed) { 0 } else { 3 } {
            tasks.spawn(self.clone().add_keyed(random.fork()));
        }
        for _ in 0..if without.contains(&Part::Operator) { 0 } else { 2 } {
            tasks.spawn(self.clone().operate(random.fork()));
        }
        if !without.contains(&Part::Cleanup) {
            tasks.spawn(self.clone().tidy(random.fork()));
        }
        if !without.contains(&Part::Limits) {
            tasks.spawn(self.clone().add_limited(random.fork()));
            tasks.spawn(self.clone().change_limits(random.fork()));
        }
        tasks
    }

    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// What was done. Leaves nothing.
    pub(crate) fn take(&self) -> Load {
        std::mem::take(&mut lock(&self.load))
    }

    fn is_over(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Waits a moment at random, longer while there is a backlog.
    async fn pause(&self, random: &mut fastrand::Rng, milliseconds: u64) {
        tokio::time::sleep(Duration::from_millis(random.u64(..=milliseconds))).await;
        while self.backlog.load(Ordering::Relaxed) > BACKLOG && !self.is_over() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Notes how a call ended.
    async fn called<T, E: Into<Failure>>(&self, call: &'static str, result: Result<T, E>) -> Option<T> {
        let error: Failure = match result {
            Ok(value) => {
                lock(&self.load).calls += 1;
                return Some(value);
            }
            Err(error) => error.into(),
        };
        let trouble = trouble(error.as_ref());
        {
            let mut load = lock(&self.load);
            load.calls += 1;
            match trouble {
                Trouble::Outage => load.outages += 1,
                Trouble::Other(code) => load.errors.push(CallError { call, code, message: chain(error.as_ref()) }),
            }
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
        None
    }

    async fn watch_backlog(self: Arc<Self>) {
        while !self.is_over() {
            let count = sqlx::query_scalar::<_, i64>("select count(*) from graphile_worker._private_jobs");
            if let Ok(count) = count.fetch_one(&self.pool).await {
                self.backlog.store(count, Ordering::Relaxed);
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    /// Jobs of all kinds but keyed ones, one by one and in batches, through SQL and through `WorkerUtils`.
    async fn produce(self: Arc<Self>, mut random: fastrand::Rng) {
        while !self.is_over() {
            match random.u8(..4) {
                0 => {
                    let job = self.ordinary_job(&mut random);
                    let added = self.add_by_sql(&job.identifier, &job.payload, &job.spec).await;
                    if let Some(id) = self.called("add_job (SQL)", added).await {
                        self.acknowledge(&job, id);
                    }
                }
                1 => {
                    let job = self.ordinary_job(&mut random);
                    let added = self.utils.add_raw_job(&job.identifier, &job.payload, job.spec.clone()).await;
                    if let Some(added) = self.called("add_job", added).await {
                        self.acknowledge(&job, added.id);
                    }
                }
                2 => {
                    // Concurrent adds of one `WorkerUtils` share a statement.
                    let jobs: Vec<_> = (0..random.usize(2..8)).map(|_| self.ordinary_job(&mut random)).collect();
                    let mut adds = tokio::task::JoinSet::new();
                    for job in jobs {
                        let driver = self.clone();
                        adds.spawn(async move {
                            let added = driver.utils.add_raw_job(&job.identifier, &job.payload, job.spec.clone()).await;
                            if let Some(added) = driver.called("add_job, merged", added).await {
                                driver.acknowledge(&job, added.id);
                            }
                        });
                    }
                    adds.join_all().await;
                }
                _ => {
                    let jobs: Vec<_> = (0..random.usize(2..30)).map(|_| self.ordinary_job(&mut random)).collect();
                    let added = self.utils.add_raw_jobs(&jobs).await;
                    for (job, added) in jobs.iter().zip(self.called("add_jobs", added).await.unwrap_or_default()) {
                        self.acknowledge(job, added.id);
                    }
                }
            }
            self.pause(&mut random, 25).await;
        }
    }

    async fn add_by_sql(&self, identifier: &str, payload: &Value, spec: &JobSpec) -> sqlx::Result<i64> {
        let sql =
            "select id from graphile_worker.add_job($1, $2::json, $3, $4, $5, $6, $7, $8, coalesce($9, 'replace'))";
        sqlx::query_scalar(sql)
            .bind(identifier)
            .bind(payload.to_string())
            .bind(&spec.queue_name)
            .bind(spec.run_at)
            .bind(spec.max_attempts.map(i32::from))
            .bind(&spec.job_key)
            .bind(spec.priority.map(i32::from))
            .bind(&spec.flags)
            .bind(spec.job_key_mode.map(JobKeyMode::as_str))
            .fetch_one(&self.pool)
            .await
    }

    fn acknowledge(&self, job: &RawJobSpec, id: i64) {
        let task = crate::worker::TASKS
            .into_iter()
            .chain([SCRIPTED])
            .find(|task| **task == *job.identifier)
            .unwrap_or("plain");
        lock(&self.load).jobs.push(AddedJob { id, task, strict: None });
        match task {
            "operated" => remember(&self.operated, id),
            "plain" => remember(&self.movable, id),
            _ => {}
        }
    }

    /// A job without a key.
    fn ordinary_job(&self, random: &mut fastrand::Rng) -> RawJobSpec {
        let mut payload = Payload::default();
        let mut spec = JobSpec::builder();
        let task = match random.u8(..100) {
            0..5 if self.scripts => {
                payload.work_ms = Some(random.u64(..60));
                SCRIPTED
            }
            5..9 => {
                payload.work_ms = Some(random.u64(20..150));
                LIMITED
            }
            9..30 => {
                // Some of them longer than a batch, some of which fail.
                payload.work_ms = Some(if random.u8(..20) == 0 { random.u64(50..200) } else { random.u64(..10) });
                payload.fail_first = (random.u8(..20) == 0).then(|| random.i16(1..3));
                REPEATABLE
            }
            0..55 => "plain",
            55..58 => {
                payload.work_ms = Some(random.u64(300..2500));
                "slow"
            }
            58..70 => {
                payload.fail_first = Some(random.i16(1..4));
                "failing"
            }
            70..73 => "fatal",
            73..79 => {
                payload.snooze_until = Some(now() + random.u64(0..1500) * MILLISECOND);
                "snoozing"
            }
            79..93 => {
                payload.work_ms = Some(random.u64(..20));
                "queued"
            }
            _ => {
                spec = spec.run_at(Utc::now() + TimeDelta::milliseconds(random.i64(0..1500)));
                "operated"
            }
        };
        if task == "queued" || (task == "failing" && random.bool()) {
            let queue = format!("loose-{}", random.u8(..5));
            spec = spec.queue_name(&queue);
            payload.queue = Some(queue);
        }
        if random.u8(..10) == 0 {
            spec = spec.priority(random.i16(-2..3));
        }
        if random.u8(..12) == 0 {
            spec = spec.flags(vec![FLAG.to_owned()]);
            payload.flag = Some(FLAG.to_owned());
        }
        RawJobSpec { identifier: task.to_owned(), payload: json!(payload), spec: spec.build() }
    }

    /// Each queue has one producer, which adds a job only after the add before it was acknowledged.
    async fn fill_strict_queues(self: Arc<Self>, part: usize, mut random: fastrand::Rng) {
        let mut next = [0_u64; STRICT_QUEUES];
        while !self.is_over() {
            let queue = random.usize(..STRICT_QUEUES / 2) * 2 + part;
            let name = format!("strict-{queue}");
            let jobs: Vec<RawJobSpec> = (0..random.usize(1..=self.strict_batch))
                .map(|_| {
                    next[queue] += 1;
                    let work_ms = Some(random.u64(..8));
                    let payload =
                        Payload { work_ms, queue: Some(name.clone()), seq: Some(next[queue]), ..Payload::default() };
                    RawJobSpec {
                        identifier: "queued".to_owned(),
                        payload: json!(payload),
                        spec: JobSpec::builder().queue_name(&name).build(),
                    }
                })
                .collect();
            let added = self.utils.add_raw_jobs(&jobs).await;
            for (job, added) in jobs.iter().zip(self.called("add_jobs, strict", added).await.unwrap_or_default()) {
                let seq = job.payload["seq"].as_u64().unwrap_or(0);
                lock(&self.load).jobs.push(AddedJob {
                    id: added.id,
                    task: "queued",
                    strict: Some((name.clone(), seq)),
                });
            }
            self.pause(&mut random, 60).await;
        }
    }

    /// Keyed adds on a few keys. Each carries an event number that is never used again.
    async fn add_keyed(self: Arc<Self>, mut random: fastrand::Rng) {
        while !self.is_over() {
            let called = now();
            match random.u8(..3) {
                0 => {
                    let (event, key, spec) = self.keyed(&mut random);
                    let added = self.add_by_sql("keyed", &json!([event]), &spec).await;
                    if let Some(id) = self.called("keyed add_job (SQL)", added).await {
                        self.acknowledge_event(event, key, id, called);
                    }
                }
                1 => {
                    let (event, key, spec) = self.keyed(&mut random);
                    let added = self.utils.add_raw_job("keyed", [event], spec).await;
                    if let Some(job) = self.called("keyed add_job", added).await {
                        self.acknowledge_event(event, key, job.id, called);
                    }
                }
                _ => {
                    let adds: Vec<_> = (0..random.usize(2..6)).map(|_| self.keyed(&mut random)).collect();
                    let mode = adds[0].2.job_key_mode;
                    let jobs: Vec<RawJobSpec> = adds
                        .iter()
                        .map(|(event, _, spec)| {
                            // All jobs of a batch have the same mode.
                            let mut spec = spec.clone();
                            spec.job_key_mode = mode;
                            RawJobSpec { identifier: "keyed".to_owned(), payload: json!([event]), spec }
                        })
                        .collect();
                    let added = self.utils.add_raw_jobs(&jobs).await;
                    let added = self.called("keyed add_jobs", added).await.unwrap_or_default();
                    for ((event, key, _), job) in adds.into_iter().zip(added) {
                        self.acknowledge_event(event, key, job.id, called);
                    }
                }
            }
            self.pause(&mut random, 25).await;
        }
    }

    fn keyed(&self, random: &mut fastrand::Rng) -> (u64, String, JobSpec) {
        let event = self.next_event.fetch_add(1, Ordering::Relaxed);
        let key = match random.u8(..10) {
            0..2 => format!("removable-{}", random.u8(..3)),
            2..4 => format!("cold-{}", random.u8(..200)),
            _ => format!("hot-{}", random.u8(..6)),
        };
        let mode = if random.bool() { JobKeyMode::Replace } else { JobKeyMode::PreserveRunAt };
        let mut spec = JobSpec::builder().job_key(&key).job_key_mode(mode);
        if random.u8(..3) == 0 {
            spec = spec.run_at(Utc::now() + TimeDelta::milliseconds(random.i64(0..400)));
        }
        (event, key, spec.build())
    }

    fn acknowledge_event(&self, event: u64, key: String, job: i64, called: Nanos) {
        remember(&self.movable, job);
        lock(&self.load).events.push(AddedEvent { event, key, job, called, acknowledged: now() });
    }

    /// A keyed add in a transaction that stays open for a while and then commits or not.
    pub(crate) async fn hold_keyed_add(&self, random: &mut fastrand::Rng, length: Duration) -> sqlx::Result<()> {
        let called = now();
        let (event, key, spec) = self.keyed(random);
        let commits = random.u8(..4) > 0;
        let mut connection = self.connect().await?;
        let mut transaction = connection.begin().await?;
        let added = self.utils.within(&mut transaction).add_raw_job("keyed", [event], spec).await;
        let Some(job) = self.called("keyed add_job in a transaction", added).await else { return Ok(()) };
        tokio::time::sleep(length).await;
        if !commits {
            return transaction.rollback().await;
        }
        if self.called("commit", transaction.commit().await).await.is_some() {
            self.acknowledge_event(event, key, job.id, called);
        }
        Ok(())
    }

    /// Removes, reschedules, completes and fails jobs.
    async fn operate(self: Arc<Self>, mut random: fastrand::Rng) {
        while !self.is_over() {
            match random.u8(..4) {
                0 => self.remove(&mut random).await,
                1 => {
                    let mut ids = choose(&self.movable, &mut random, 40);
                    ids.extend(choose(&self.operated, &mut random, 10));
                    let wait = TimeDelta::milliseconds(random.i64(0..800));
                    let options = RescheduleJobOptions::default().run_at(Utc::now() + wait);
                    let moved = self.utils.reschedule_jobs(&ids, options).await;
                    self.called("reschedule_jobs", moved).await;
                }
                2 => {
                    let ids = choose(&self.operated, &mut random, 5);
                    let completed = self.utils.complete_jobs(&ids).await;
                    let completed = self.called("complete_jobs", completed).await;
                    self.operated_on(&ids, completed);
                }
                _ => {
                    let ids = choose(&self.operated, &mut random, 3);
                    let failed = self.utils.permanently_fail_jobs(&ids, "an operator has failed it").await;
                    let failed = self.called("permanently_fail_jobs", failed).await;
                    self.operated_on(&ids, failed);
                }
            }
            self.pause(&mut random, 150).await;
        }
    }

    async fn remove(&self, random: &mut fastrand::Rng) {
        let key = format!("removable-{}", random.u8(..3));
        let removed = self.utils.remove_job(&key).await;
        match self.called("remove_job", removed).await {
            Some(job) => {
                let events: Vec<u64> =
                    job.and_then(|job| serde_json::from_str(job.payload.get()).ok()).unwrap_or_default();
                lock(&self.load).removed_events.extend(events);
            }
            None => lock(&self.load).maybe_removed.push((key, now())),
        }
    }

    fn operated_on(&self, ids: &[i64], answer: Option<Vec<Job>>) {
        let mut load = lock(&self.load);
        match answer {
            Some(jobs) => load.operated.extend(jobs.iter().map(|job| job.id)),
            None => load.maybe_operated.extend(ids),
        }
    }

    /// Cleans up and migrates again and again. Leaves the schema complete.
    async fn tidy(self: Arc<Self>, mut random: fastrand::Rng) {
        self.tidy_until_over(&mut random).await;
        for _ in 0..20 {
            let migrated = self.utils.migrate().await;
            if self.called("migrate", migrated).await.is_some() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    }

    async fn tidy_until_over(&self, random: &mut fastrand::Rng) {
        while !self.is_over() {
            let all =
                [CleanupTask::GcTaskIdentifiers, CleanupTask::GcJobQueues, CleanupTask::DeletePermanentlyFailedJobs];
            let some: Vec<_> = all.into_iter().filter(|_| random.u8(..3) > 0).collect();
            let cleaned = self.utils.cleanup(&some).await;
            self.called("cleanup", cleaned).await;
            if random.u8(..4) == 0 {
                let undone = self.undo_a_step(random).await;
                self.called("undo a step", undone).await;
                let migrated = self.utils.migrate().await;
                if let Some(migration) = self.called("migrate", migrated).await {
                    lock(&self.load).migrations += u64::from(migration.changed);
                }
            }
            tokio::time::sleep(Duration::from_millis(random.u64(200..1500))).await;
        }
    }
}

impl Driver {
    /// Makes the schema look like that of the release before, so that `migrate` has something to do beside running
    /// workers: to install the functions and the columns of the last step, or to build an index.
    async fn undo_a_step(&self, random: &mut fastrand::Rng) -> sqlx::Result<()> {
        let index = random.choice(["_rs_jobs_unqueued", "_rs_jobs_in_queues", "_rs_jobs_by_queue", "_rs_jobs_by_kind"]);
        let (step, index) = if random.bool() { (FUNCTIONS_STEP, None) } else { (INDEXES_STEP, index) };
        if let Some(index) = index {
            let drop = format!("drop index concurrently if exists graphile_worker.{index}");
            sqlx::query(sqlx::AssertSqlSafe(drop)).execute(&self.pool).await?;
        }
        let forget = "delete from graphile_worker._rs_additions where id = $1";
        sqlx::query(forget).bind(step).execute(&self.pool).await?;
        Ok(())
    }

    /// Frees the jobs of one of Node's workers that was killed, and returns them. Nothing else would free them for four
    /// hours. Waits for the end of the sessions first: a claim may still be under way there.
    pub(crate) async fn unlock(&self, application: &str, workers: &[&str]) -> Result<Vec<i64>, Failure> {
        let mut jobs = Vec::new();
        let end = tokio::time::Instant::now() + Duration::from_secs(60);
        loop {
            match self.try_unlock(application, workers, &mut jobs).await {
                Ok(true) => return Ok(jobs),
                Err(error) if tokio::time::Instant::now() > end => return Err(error),
                Ok(false) if tokio::time::Instant::now() > end => {
                    return Err(format!("the sessions of {application} do not end").into());
                }
                _ => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    }

    async fn try_unlock(&self, application: &str, workers: &[&str], jobs: &mut Vec<i64>) -> Result<bool, Failure> {
        let sessions = "select count(*) from pg_stat_activity where application_name = $1";
        if sqlx::query_scalar::<_, i64>(sessions).bind(application).fetch_one(&self.pool).await? > 0 {
            return Ok(false);
        }
        let held = "select id from graphile_worker._private_jobs where locked_by = any ($1)";
        let held: Vec<i64> = sqlx::query_scalar(held).bind(workers).fetch_all(&self.pool).await?;
        for id in held {
            if !jobs.contains(&id) {
                jobs.push(id);
            }
        }
        self.utils.force_unlock_workers(workers).await?;
        Ok(true)
    }
}

fn remember(ids: &Mutex<VecDeque<i64>>, id: i64) {
    let mut ids = lock(ids);
    ids.push_back(id);
    if ids.len() > RECENT {
        ids.pop_front();
    }
}

/// Some of the newest ids, in no particular order.
fn choose(ids: &Mutex<VecDeque<i64>>, random: &mut fastrand::Rng, most: usize) -> Vec<i64> {
    let ids = lock(ids);
    (0..random.usize(1..=most)).filter_map(|_| random.choice(ids.iter()).copied()).collect()
}

enum Trouble {
    /// The server or the connection was away, as the faults want it.
    Outage,
    /// Anything else, with its SQLSTATE.
    Other(String),
}

fn trouble(error: &(dyn std::error::Error + 'static)) -> Trouble {
    let mut next = Some(error);
    while let Some(error) = next {
        match error.downcast_ref::<sqlx::Error>() {
            Some(sqlx::Error::Database(database)) => {
                let code = database.code().unwrap_or_default().into_owned();
                // Shutdown, too many connections, disk full, input/output error, connection exceptions.
                let outage = ["57P", "533", "531", "58", "08"].iter().any(|class| code.starts_with(class));
                return if outage { Trouble::Outage } else { Trouble::Other(code) };
            }
            Some(sqlx::Error::Io(_) | sqlx::Error::Tls(_) | sqlx::Error::PoolTimedOut | sqlx::Error::Protocol(_)) => {
                return Trouble::Outage;
            }
            _ => {}
        }
        next = error.source();
    }
    Trouble::Other("no SQLSTATE".to_owned())
}

/// The error with all its sources.
fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        text.push_str(": ");
        text.push_str(&source.to_string());
        next = source.source();
    }
    text
}
