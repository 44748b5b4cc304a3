//! Hosts: long-lived child processes that run task files of other languages. This file decides how many hosts run, and
//! which of them gets a job. `process` is one host, `protocol` defines the frames, `language` the commands that start hosts.
//!
//! ```text
//!   runner ── Script::task ── Pool::place ──► Process ══ socket ══ node, python, … ── your file
//! ```

mod language;
mod process;
mod protocol;

use graphile_worker::task_source::TaskSourceSetup;
use graphile_worker::{
    BatchResult, DatabaseConfig, JobDefinition, TaskError, TaskOptions, TaskOutcome, TaskResult, WorkerContext,
};
pub(crate) use language::Language;
use language::OtherLanguage;
use process::{Blame, Crash, HOST_ENDED, Launch, LoadError, Process, Run, RunResult, Suspects};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tracing::warn;

/// How long a host may be idle before it is ended, unless it is the last one.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// The interval between two checks for idle hosts.
const IDLE_INTERVAL: Duration = Duration::from_secs(5);

/// How many times in a row a host that ends at once is started, before that counts as a failure.
const START_TRIES: u32 = 3;

/// The pause after a failed start before the pool starts a host again.
const START_PAUSE: Duration = Duration::from_secs(1);

/// How often a job that waits for a new host checks whether one of the others is free again.
const HOST_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// How long a task may take to end by itself after it was aborted because of its timeout.
const SCRIPT_CANCEL_GRACE: Duration = Duration::from_millis(500);

/// The maximum time between a request to stop and the abort of running tasks: as long as Node's worker waits.
const ABORT_DELAY: Duration = Duration::from_secs(5);

/// A suspect, a job that may have ended its host, gets a host for itself until it has run for `TRIAL_MARGIN` longer than
/// before, and for `LONGEST_TRIAL` at most: other suspects may be waiting.
const TRIAL_MARGIN: Duration = Duration::from_secs(1);
const LONGEST_TRIAL: Duration = Duration::from_secs(10);

/// Settings of the hosts: their programs, their number and their memory.
///
/// ```
/// use graphile_worker_scripts::HostOptions;
///
/// let options = HostOptions::default().node("/opt/node22/bin/node").max_hosts(4);
/// ```
#[derive(Debug, Clone)]
#[must_use]
pub struct HostOptions {
    node: Option<PathBuf>,
    python: Option<PathBuf>,
    max_hosts: Option<usize>,
    memory_limit: Option<u64>,
    others: Vec<Arc<OtherLanguage>>,
}

impl Default for HostOptions {
    fn default() -> HostOptions {
        HostOptions { node: None, python: None, max_hosts: None, memory_limit: Some(4 << 30), others: Vec::new() }
    }
}

impl HostOptions {
    /// Sets the Node that runs JavaScript and TypeScript (default: `node` on the PATH; at least 18).
    pub fn node(mut self, program: impl Into<PathBuf>) -> HostOptions {
        self.node = Some(program.into());
        self
    }

    /// Sets the Python that runs Python files (default: that of `VIRTUAL_ENV`, of a `.venv` beside or above the folder of
    /// tasks, else `python3` on the PATH; at least 3.9).
    pub fn python(mut self, program: impl Into<PathBuf>) -> HostOptions {
        self.python = Some(program.into());
        self
    }

    /// Sets the maximum number of hosts per language (default: the number of cores). A second host starts only while
    /// the first is busy.
    pub fn max_hosts(mut self, hosts: usize) -> HostOptions {
        self.max_hosts = Some(hosts.max(1));
        self
    }

    /// Sets the memory limit of a host in bytes (default: 4 GiB; `None`: no limit). A host that exceeds it is killed, and
    /// the job that caused it fails. Needs a system with `/proc`.
    pub fn memory_limit(mut self, bytes: Option<u64>) -> HostOptions {
        self.memory_limit = bytes;
        self
    }

    /// Adds a language: this command starts a host of your own for files with these extensions. It speaks the protocol
    /// of `docs/host-protocol.md`.
    pub fn language(
        mut self,
        name: impl Into<String>,
        extensions: impl IntoIterator<Item = impl Into<String>>,
        command: impl IntoIterator<Item = impl Into<String>>,
    ) -> HostOptions {
        self.others.push(Arc::new(OtherLanguage {
            name: name.into(),
            extensions: extensions.into_iter().map(Into::into).collect(),
            command: command.into_iter().map(Into::into).collect(),
        }));
        self
    }

    /// All languages of task files. If several files differ only in their extensions, the first language wins, and of its
    /// extensions the first.
    pub(crate) fn languages(&self) -> Vec<Language> {
        let others = self.others.iter().cloned().map(Language::Other);
        [Language::JavaScript, Language::Python].into_iter().chain(others).collect()
    }
}

/// What all hosts of a worker share.
pub(crate) struct HostSettings {
    pub(crate) options: HostOptions,
    pub(crate) setup: TaskSourceSetup,
}

/// The hosts of a worker, of all languages. Dropping this ends them.
pub(crate) struct Hosts {
    settings: Arc<HostSettings>,
    tasks_dir: Arc<Path>,
    pools: Mutex<HashMap<Language, Arc<Pool>>>,
}

impl Hosts {
    pub(crate) fn new(tasks_dir: &Path, settings: HostSettings) -> Hosts {
        Hosts { settings: Arc::new(settings), tasks_dir: tasks_dir.into(), pools: Mutex::default() }
    }

    /// The worker's database, for connections of tasks.
    pub(crate) fn database(&self) -> &DatabaseConfig {
        &self.settings.setup.database
    }

    /// The languages that have hosts.
    pub(crate) fn languages(&self) -> Vec<Language> {
        self.settings.options.languages()
    }

    /// Loads a task's file, or its new version. Running jobs continue with the old version. If the new one does not load,
    /// so do later jobs.
    pub(crate) async fn load(&self, language: &Language, identifier: &str, path: &Path) -> Result<Script, NotLoaded> {
        let (pool, name, file) = (self.pool(language), identifier.to_owned(), path.to_owned());
        // In a task of its own: the caller may be dropped, and that must not leave a host half started.
        let loading = tokio::spawn(async move { pool.load(&name, &file).await });
        let script = loading.await.map_err(|error| NotLoaded::Refused(error.to_string()))??;
        // The task may have been a file of another language before.
        for (_, pool) in self.lock().iter().filter(|(other, _)| *other != language) {
            pool.unload(identifier);
        }
        Ok(script)
    }

    /// Forgets a task.
    pub(crate) fn unload(&self, identifier: &str) {
        for pool in self.lock().values() {
            pool.unload(identifier);
        }
    }

    /// Ends all hosts, and returns when they have ended. The next job starts one again.
    pub(crate) async fn stop(&self) {
        let pools: Vec<Arc<Pool>> = self.lock().values().cloned().collect();
        futures_util::future::join_all(pools.iter().map(|pool| pool.stop())).await;
    }

    /// Ends the hosts with running jobs, and returns when they have ended. If `forced` is cancelled, kills them at once.
    pub(crate) async fn end_jobs(&self, forced: &CancellationToken) {
        let pools: Vec<Arc<Pool>> = self.lock().values().cloned().collect();
        let busy: Vec<Arc<Process>> = pools.iter().flat_map(|pool| pool.busy()).collect();
        busy.iter().for_each(|process| process.end());
        let ended = futures_util::future::join_all(busy.iter().map(|process| process.ended()));
        let mut ended = pin!(ended);
        tokio::select! {
            _ = &mut ended => {}
            () = forced.cancelled() => {
                busy.iter().for_each(|process| process.kill_now());
                ended.await;
            }
        }
    }

    fn pool(&self, language: &Language) -> Arc<Pool> {
        let new = || Arc::new(Pool::new(language.clone(), self.settings.clone(), self.tasks_dir.clone()));
        self.lock().entry(language.clone()).or_insert_with(new).clone()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Language, Arc<Pool>>> {
        self.pools.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for pool in self.lock().values() {
            pool.close();
        }
    }
}

/// Why a task's file could not be loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum NotLoaded {
    /// The file does not load.
    Refused(String),
    /// No host is running that could load it. One may start later.
    NoHost(String),
}

/// A task that hosts run.
#[derive(Clone)]
pub(crate) struct Script {
    file: Arc<File>,
    pool: Arc<Pool>,
}

impl Script {
    /// The task, for a worker. It runs the newest version that has loaded.
    pub(crate) fn definition(&self) -> JobDefinition {
        let script = self.clone();
        let run = move |ctx| script.clone().run(ctx);
        JobDefinition::external(&self.file.identifier, TaskOptions::default(), SCRIPT_CANCEL_GRACE, run)
    }

    /// Runs a job to its end, and again if another job has ended its host. That costs no attempt: the job stays claimed, so
    /// that no other worker can start it, and the next job of its queue waits.
    async fn run(self, ctx: WorkerContext) -> TaskResult {
        let mut isolation = Isolation::first(ctx.job());
        let mut crashes = 0;
        loop {
            ctx.pause_timeout();
            let begun = tokio::select! {
                biased;
                begun = self.pool.begin(&self.file, &ctx, &isolation) => begun,
                // The worker is stopping, and the job has not started yet.
                () = ctx.cancellation_token().cancelled(), if isolation.is_alone() => return TaskResult::released(),
                // The job was cancelled before it started. The worker knows what that means.
                () = ctx.cancelled() => return TaskResult::released(),
            };
            ctx.restart_timeout();
            let (run, reservation) = match begun {
                Ok(begun) => begun,
                Err(why) => return Err(TaskError::jittered(why)).into(),
            };
            let began = Instant::now();
            let crash = match self.ended(run, reservation, &isolation, &ctx).await {
                RunResult::WithHost(crash) => crash,
                ended => return answer(ended, &ctx),
            };
            if matches!(crash.blame, Blame::This) {
                isolation.prove();
            }
            crashes += 1;
            let Some(next) = Isolation::after(&crash, crashes, began) else {
                return Err(TaskError::jittered(crash.sentence)).into();
            };
            if ctx.cancellation_token().is_cancelled() {
                return TaskResult::released();
            }
            isolation = next;
            log_rerun(&crash, &isolation);
        }
    }

    /// Waits for the end of a run. If the job has a host for itself, other jobs may use that host once the trial is over.
    async fn ended(
        &self,
        run: Run,
        reservation: Option<Reservation>,
        isolation: &Isolation,
        ctx: &WorkerContext,
    ) -> RunResult {
        let mut ended = pin!(run.ended(self.must_stop(ctx)));
        let trial = match isolation {
            Isolation::Alone { trial: Some(trial), .. } => *trial,
            _ => return ended.await,
        };
        match tokio::time::timeout(trial, &mut ended).await {
            Ok(ended) => ended,
            Err(_) => {
                drop(reservation);
                ended.await
            }
        }
    }

    /// Returns when a job should be aborted: when it is cancelled, when its timeout has passed, or some time after the worker began to stop. Until
    /// then the job may well finish; most code that is aborted fails.
    async fn must_stop(&self, ctx: &WorkerContext) {
        let half_time = self.pool.settings.setup.shutdown_grace_period / 2;
        let leaving = async {
            ctx.cancellation_token().cancelled().await;
            tokio::time::sleep(half_time.min(ABORT_DELAY)).await;
        };
        tokio::select! {
            () = ctx.timed_out() => {}
            () = ctx.cancelled() => {}
            () = leaving => {}
        }
    }
}

fn answer(ended: RunResult, ctx: &WorkerContext) -> TaskResult {
    match ended {
        RunResult::Done => Ok(TaskOutcome::Done).into(),
        RunResult::Failed(problem) => Err(problem.task_error()).into(),
        RunResult::FailedItems(failed) => {
            let items: Vec<Box<serde_json::value::RawValue>> =
                serde_json::from_str(ctx.payload().get()).unwrap_or_default();
            let results = protocol::item_results(items.len(), failed);
            TaskResult::of_batch(&items, BatchResult::Each(results))
        }
        RunResult::WithHost(crash) => Err(TaskError::jittered(crash.sentence)).into(),
    }
}

/// Logs why a job runs again, with the culprit or the suspects. The job itself has no error that could name them.
fn log_rerun(crash: &Crash, isolation: &Isolation) {
    let (reason, alone) = (&*crash.sentence, isolation.is_alone());
    match &crash.blame {
        Blame::Unknown(suspects) => {
            let names: Vec<String> = suspects.names.iter().map(ToString::to_string).collect();
            warn!(suspects = names.join(", "), alone, reason, "the job runs again, which costs no attempt");
        }
        Blame::Other(culprit) => warn!(culprit, alone, reason, "the job runs again, which costs no attempt"),
        Blame::This | Blame::NoJob => {}
    }
}

/// Whether a job shares a host with others.
enum Isolation {
    Shared,
    Alone {
        /// Its place among the jobs that wait for a host of their own.
        place: PlaceInLine,
        /// For how long; `None`: to its end.
        trial: Option<Duration>,
        /// The jobs of which one has crashed their host. Once the culprit is known, the others need not run alone.
        suspects: Option<Arc<Suspects>>,
    },
}

/// The job whose host ended first comes first. Among jobs of the same host, it is the one that started last, because most
/// crashes happen soon after the start.
type PlaceInLine = (Instant, Reverse<Instant>);

impl Isolation {
    fn to_the_end(began: Instant) -> Isolation {
        Isolation::Alone { place: (Instant::now(), Reverse(began)), trial: None, suspects: None }
    }

    /// A job that has crashed a host on any worker is likely to crash another.
    fn first(job: &graphile_worker::Job) -> Isolation {
        match &job.last_error {
            Some(error) if error.starts_with(HOST_ENDED) => Isolation::to_the_end(Instant::now()),
            _ => Isolation::Shared,
        }
    }

    /// How a job runs again after its host has ended; `None` if the job itself was the cause. After a second crash it runs
    /// alone to its end, so that no other job can stop it from finishing.
    fn after(crash: &Crash, crashes: u32, began: Instant) -> Option<Isolation> {
        match &crash.blame {
            Blame::This | Blame::NoJob => None,
            _ if crashes > 1 => Some(Isolation::to_the_end(began)),
            Blame::Other(_) => Some(Isolation::Shared),
            Blame::Unknown(suspects) => {
                let trial = Some((began.elapsed() + TRIAL_MARGIN).min(LONGEST_TRIAL));
                let place = (suspects.at, Reverse(began));
                Some(Isolation::Alone { place, trial, suspects: Some(suspects.clone()) })
            }
        }
    }

    fn is_alone(&self) -> bool {
        matches!(self, Isolation::Alone { .. })
    }

    fn suspects(&self) -> Option<&Suspects> {
        match self {
            Isolation::Alone { suspects, .. } => suspects.as_deref(),
            Isolation::Shared => None,
        }
    }

    /// Records that this job was the culprit.
    fn prove(&self) {
        if let Some(suspects) = self.suspects() {
            suspects.proven.cancel();
        }
    }

    /// Returns when another job has proven to be the culprit.
    async fn is_cleared(&self) {
        match self.suspects() {
            Some(suspects) => suspects.proven.cancelled().await,
            None => std::future::pending().await,
        }
    }
}

/// Reserves a host for one job, until this is dropped.
struct Reservation {
    pool: Arc<Pool>,
    process: Arc<Process>,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut state = self.pool.state();
        for host in &mut state.hosts {
            if Arc::ptr_eq(&host.process, &self.process) {
                host.is_reserved = false;
            }
        }
        drop(state);
        self.pool.changed.notify_waiters();
    }
}

/// A job that waits for a host of its own, until this is dropped.
struct InLine {
    pool: Arc<Pool>,
    place: (PlaceInLine, u64),
}

impl InLine {
    fn new(pool: &Arc<Pool>, place: PlaceInLine) -> InLine {
        let mut state = pool.state();
        state.last_in_line += 1;
        let place = (place, state.last_in_line);
        state.line.insert(place);
        InLine { pool: pool.clone(), place }
    }
}

impl Drop for InLine {
    fn drop(&mut self) {
        self.pool.state().line.remove(&self.place);
        self.pool.changed.notify_waiters();
    }
}

/// A task's file.
struct File {
    identifier: Arc<str>,
    /// The version that new jobs run; 0 before the first has loaded.
    generation: AtomicU64,
    /// The last version that was loaded, successfully or not.
    tried: AtomicU64,
    path: Mutex<String>,
}

impl File {
    fn path(&self) -> String {
        self.path.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// The hosts of one language.
struct Pool {
    language: Language,
    settings: Arc<HostSettings>,
    tasks_dir: Arc<Path>,
    max_hosts: usize,
    state: Mutex<PoolState>,
    /// Notified when a host has started or failed to start, or is free again.
    changed: Notify,
    /// Held while files are loaded, so that all hosts have the same versions.
    loading: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct PoolState {
    files: BTreeMap<Arc<str>, Arc<File>>,
    hosts: Vec<Host>,
    is_starting: bool,
    is_closed: bool,
    is_supervised: bool,
    /// How many times all hosts were ended. A host that was starting at that moment is ended as well.
    stops: u64,
    /// When the last start failed, and why.
    failure: Option<(Instant, String)>,
    /// The jobs that wait for a host of their own.
    line: BTreeSet<(PlaceInLine, u64)>,
    last_in_line: u64,
}

/// A host, and what is loaded in it: the version of each task, or the reason why it does not load.
struct Host {
    process: Arc<Process>,
    loaded: HashMap<Arc<str>, Result<u64, String>>,
    /// Whether it is reserved for one job.
    is_reserved: bool,
}

/// Where a job goes.
enum Place {
    Begun(Run, Option<Reservation>),
    /// Nowhere yet: the job waits for a host.
    Later,
    Nowhere(String),
}

impl Pool {
    fn new(language: Language, settings: Arc<HostSettings>, tasks_dir: Arc<Path>) -> Pool {
        let cores = || std::thread::available_parallelism().map_or(1, usize::from);
        Pool {
            language,
            max_hosts: settings.options.max_hosts.unwrap_or_else(cores),
            settings,
            tasks_dir,
            state: Mutex::default(),
            changed: Notify::new(),
            loading: tokio::sync::Mutex::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, PoolState> {
        // A panic while the lock is held leaves the state consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a job in a host. Waits until a host can take it.
    async fn begin(
        self: &Arc<Self>,
        file: &Arc<File>,
        ctx: &WorkerContext,
        isolation: &Isolation,
    ) -> Result<(Run, Option<Reservation>), String> {
        if let Isolation::Alone { place, .. } = isolation {
            let in_line = InLine::new(self, *place);
            tokio::select! {
                biased;
                () = isolation.is_cleared() => {}
                begun = self.begin_by(|| self.place_alone(file, ctx, &in_line)) => return begun,
            }
        }
        self.begin_by(|| self.place(file, ctx)).await
    }

    async fn begin_by(&self, place: impl Fn() -> Place) -> Result<(Run, Option<Reservation>), String> {
        loop {
            match place() {
                Place::Begun(run, reservation) => return Ok((run, reservation)),
                // If the notification came just before, the timeout ends the wait.
                Place::Later => drop(tokio::time::timeout(HOST_POLL_INTERVAL, self.changed.notified()).await),
                Place::Nowhere(why) => return Err(why),
            }
        }
    }

    /// Starts a job in an idle host and reserves that host for it, if it is the job's turn and a host is idle.
    fn place_alone(self: &Arc<Self>, file: &Arc<File>, ctx: &WorkerContext, in_line: &InLine) -> Place {
        let mut state = self.state();
        if !state.files.contains_key(&file.identifier) {
            return Place::Nowhere(format!("{} is no longer a task", file.path()));
        }
        if state.is_closed {
            return Place::Nowhere(format!("the hosts for {} have ended", self.language.name()));
        }
        if state.line.first() != Some(&in_line.place) || state.reserved() >= self.max_hosts {
            return Place::Later;
        }
        let generation = file.generation.load(Ordering::Acquire);
        for host in &mut state.hosts {
            let load = host.process.load_now();
            let is_free = load.takes_jobs && load.jobs == 0 && !host.is_reserved;
            if is_free
                && host.has(file, generation)
                && let Some(run) = host.process.begin(&file.identifier, generation, ctx)
            {
                host.is_reserved = true;
                let reservation = Reservation { pool: self.clone(), process: host.process.clone() };
                return Place::Begun(run, Some(reservation));
            }
        }
        let running = state.running().count();
        if let Some(why) = (running > 0).then(|| state.refusal(file)).flatten() {
            return Place::Nowhere(why);
        }
        if running < self.most_hosts(&state) {
            self.start_another(&mut state);
        }
        match &state.failure {
            Some((_, why)) if running == 0 && !state.is_starting => Place::Nowhere(why.clone()),
            _ => Place::Later,
        }
    }

    /// The maximum number of hosts: one more while jobs run alone, so that other jobs continue.
    fn most_hosts(&self, state: &PoolState) -> usize {
        self.max_hosts + usize::from(state.reserved() > 0 || !state.line.is_empty())
    }

    fn place(self: &Arc<Self>, file: &Arc<File>, ctx: &WorkerContext) -> Place {
        let mut state = self.state();
        if !state.files.contains_key(&file.identifier) {
            return Place::Nowhere(format!("{} is no longer a task", file.path()));
        }
        let generation = file.generation.load(Ordering::Acquire);
        let most_hosts = self.most_hosts(&state);
        let is_for_others = state.keeps_an_idle_host(self.max_hosts);
        let (begun, has_time, alive) = loop {
            let loads = state.hosts.iter().map(|host| (host, host.process.load_now()));
            let mut alive = 0;
            let running = loads.filter(|(_, load)| load.takes_jobs).inspect(|_| alive += 1);
            let is_taken = |host: &Host, jobs: usize| host.is_reserved || (is_for_others && jobs == 0);
            let open = running.filter(|(host, load)| !is_taken(host, load.jobs));
            let able = open.filter(|(host, _)| host.has(file, generation));
            let Some((host, load)) = able.min_by_key(|(_, load)| (load.blocked_for, load.jobs)) else {
                break (None, false, alive);
            };
            if load.is_blocked() && alive < most_hosts && state.may_start() {
                // The job could wait for ever behind one that never ends. Another host starts in a moment.
                break (None, false, alive);
            }
            // If the host has ended in the meantime, the loop tries another one.
            if let Some(run) = host.process.begin(&file.identifier, generation, ctx) {
                let has_time = load.jobs == 0 || !(load.is_blocked() || load.is_busy);
                break (Some(run), has_time, alive);
            }
        };
        let refusal = (begun.is_none() && alive > 0).then(|| state.refusal(file)).flatten();
        if refusal.is_none() && !has_time && alive < most_hosts {
            self.start_another(&mut state);
        }
        match (begun, refusal, &state.failure) {
            (Some(run), ..) => Place::Begun(run, None),
            (None, Some(why), _) => Place::Nowhere(why),
            (None, None, _) if state.is_starting || is_for_others || state.reserved() > 0 => Place::Later,
            (None, None, Some((_, why))) => Place::Nowhere(why.clone()),
            (None, None, None) => Place::Nowhere(format!("the hosts for {} have ended", self.language.name())),
        }
    }

    fn start_another(self: &Arc<Self>, state: &mut PoolState) {
        if state.is_starting || !state.may_start() {
            return;
        }
        state.is_starting = true;
        let pool = self.clone();
        tokio::spawn(async move {
            let _loading = pool.loading.lock().await;
            // Loading a file may have started a host in the meantime.
            let is_wanted = {
                let state = pool.state();
                state.running().count() < pool.most_hosts(&state)
            };
            if is_wanted {
                pool.start_host().await;
            } else {
                pool.state().is_starting = false;
                pool.changed.notify_waiters();
            }
        });
    }

    /// Starts a host with all files loaded in it. The caller holds `loading`.
    async fn start_host(self: &Arc<Self>) {
        let stops = {
            let mut state = self.state();
            state.is_starting = true;
            state.stops
        };
        let started = self.started_host().await;
        {
            let mut state = self.state();
            state.is_starting = false;
            match started {
                Ok(host) if state.is_closed || state.stops != stops => host.process.end(),
                Ok(host) => {
                    state.failure = None;
                    state.hosts.push(host);
                    if !std::mem::replace(&mut state.is_supervised, true) {
                        tokio::spawn(supervise(Arc::downgrade(self)));
                    }
                }
                Err(why) => {
                    warn!(label = "host", language = self.language.name(), reason = why, "cannot start a host");
                    state.failure = Some((Instant::now(), why));
                }
            }
        }
        self.changed.notify_waiters();
    }

    /// Starts a process and loads all files in it. If a file ends the process, the next try leaves that file out.
    async fn started_host(&self) -> Result<Host, String> {
        let command = self.language.command(&self.settings.options, &self.tasks_dir).await?;
        let launch = Arc::new(Launch {
            language: self.language.clone(),
            command,
            source: self.language.source(),
            tasks_dir: self.tasks_dir.to_string_lossy().into_owned(),
            database: self.settings.setup.database.clone(),
            schema: self.settings.setup.schema.clone(),
            concurrency: self.settings.setup.concurrency,
            max_pool_size: self.settings.setup.max_pool_size,
            memory_limit: self.settings.options.memory_limit,
        });
        let mut fatal: HashMap<Arc<str>, String> = HashMap::new();
        loop {
            let process = self.started_process(&launch).await?;
            let files: Vec<Arc<File>> = self.state().files.values().cloned().collect();
            let (bad, good): (Vec<_>, Vec<_>) =
                files.into_iter().partition(|file| fatal.contains_key(&file.identifier));
            let tried = good.iter().map(|file| {
                let process = &process;
                async move {
                    let generation = file.generation.load(Ordering::Acquire).max(1);
                    let loaded = process.load(&file.identifier, &file.path(), generation).await;
                    (file.identifier.clone(), loaded.map(|()| generation))
                }
            });
            let tried = futures_util::future::join_all(tried).await;
            let mut loaded: HashMap<Arc<str>, Result<u64, String>> = HashMap::new();
            let mut gone = None;
            let before = fatal.len();
            for (identifier, result) in tried {
                match result {
                    Ok(generation) => drop(loaded.insert(identifier, Ok(generation))),
                    Err(LoadError::Refused(why) | LoadError::EndedHost(why)) => {
                        fatal.insert(identifier.clone(), why.clone());
                        loaded.insert(identifier, Err(why));
                    }
                    Err(LoadError::HostGone(why)) => gone = Some(why),
                }
            }
            for file in bad {
                let why = fatal.get(&file.identifier).cloned().unwrap_or_default();
                loaded.insert(file.identifier.clone(), Err(why));
            }
            match gone.or_else(|| (!process.load_now().takes_jobs).then(|| "the host ended".into())) {
                None => return Ok(Host { process, loaded, is_reserved: false }),
                Some(why) if fatal.len() == before => return Err(why.to_string()),
                Some(_) => {}
            }
        }
    }

    /// Starts a process. If it ends before it is ready, tries again: the cause may be temporary.
    async fn started_process(&self, launch: &Arc<Launch>) -> Result<Arc<Process>, String> {
        let mut tries = 1;
        loop {
            let began = Instant::now();
            match Process::start(launch.clone()).await {
                Err(why) if tries < START_TRIES && began.elapsed() < START_PAUSE && !self.state().is_closed => {
                    warn!(
                        label = "host",
                        language = self.language.name(),
                        reason = why,
                        "a host did not start: retrying"
                    );
                    tokio::time::sleep(START_PAUSE / 10 * tries).await;
                    tries += 1;
                }
                started => return started,
            }
        }
    }

    /// Loads a file, or its new version, in all hosts.
    async fn load(self: &Arc<Self>, identifier: &str, path: &Path) -> Result<Script, NotLoaded> {
        let _loading = self.loading.lock().await;
        let path = path.to_string_lossy().into_owned();
        let known = self.state().files.get(identifier).cloned();
        let file = known.unwrap_or_else(|| {
            Arc::new(File {
                identifier: identifier.into(),
                generation: AtomicU64::new(0),
                tried: AtomicU64::new(0),
                path: Mutex::new(path.clone()),
            })
        });
        let generation = file.tried.fetch_add(1, Ordering::AcqRel) + 1;
        let mut problem = None;
        // A host that ends while it loads, because of this file or not, is replaced once.
        for _ in 0..2 {
            if !self.has_host() {
                // After a recent failure another start would probably fail as well, and take as long.
                if !self.state().failed_lately() {
                    self.start_host().await;
                }
                if let (false, Some((_, why))) = (self.has_host(), &self.state().failure) {
                    return Err(NotLoaded::NoHost(why.clone()));
                }
            }
            match self.load_in_hosts(&file, &path, generation).await {
                Ok(()) => {
                    *file.path.lock().unwrap_or_else(PoisonError::into_inner) = path;
                    file.generation.store(generation, Ordering::Release);
                    self.state().files.insert(file.identifier.clone(), file.clone());
                    return Ok(Script { file, pool: self.clone() });
                }
                Err(LoadError::Refused(why)) => return Err(NotLoaded::Refused(why)),
                // The first time there may be another cause; the second time it is the file.
                Err(LoadError::EndedHost(why)) => problem = Some(NotLoaded::Refused(why)),
                Err(LoadError::HostGone(why)) => problem = Some(NotLoaded::NoHost(why.to_string())),
            }
        }
        Err(problem.unwrap_or_else(|| NotLoaded::NoHost("the host ended".to_owned())))
    }

    fn has_host(&self) -> bool {
        let mut state = self.state();
        state.drop_ended();
        state.running().next().is_some()
    }

    /// Loads a version in all hosts. One host that has loaded it is enough.
    async fn load_in_hosts(&self, file: &Arc<File>, path: &str, generation: u64) -> Result<(), LoadError> {
        let processes: Vec<Arc<Process>> = self.state().running().map(|host| host.process.clone()).collect();
        let loads = processes.iter().map(|process| process.load(&file.identifier, path, generation));
        let results = futures_util::future::join_all(loads).await;
        let mut ended = Err(LoadError::HostGone("the host ended".into()));
        let mut behind: Vec<Arc<Process>> = Vec::new();
        let mut state = self.state();
        for (process, result) in processes.iter().zip(results) {
            let host = state.hosts.iter_mut().find(|host| Arc::ptr_eq(&host.process, process));
            if let (Some(host), Ok(())) = (host, &result) {
                host.loaded.insert(file.identifier.clone(), Ok(generation));
            }
            if result.is_err() {
                // If other hosts have the new version, jobs go to them.
                behind.push(process.clone());
            }
            match (&ended, &result) {
                (Ok(()), _) | (Err(LoadError::Refused(_) | LoadError::EndedHost(_)), Err(_)) => {}
                _ => ended = result,
            }
        }
        if ended.is_ok() {
            behind.iter().for_each(|process| process.retire());
        }
        ended
    }

    fn unload(&self, identifier: &str) {
        let mut state = self.state();
        if state.files.remove(identifier).is_none() {
            return;
        }
        for host in &mut state.hosts {
            host.loaded.remove(identifier);
            host.process.unload(identifier);
        }
    }

    fn close(&self) {
        let mut state = self.state();
        state.is_closed = true;
        for host in state.hosts.drain(..) {
            host.process.end();
        }
    }

    async fn stop(&self) {
        let hosts = {
            let mut state = self.state();
            state.stops += 1;
            std::mem::take(&mut state.hosts)
        };
        for host in &hosts {
            host.process.end();
        }
        for host in &hosts {
            host.process.ended().await;
        }
    }

    fn busy(&self) -> Vec<Arc<Process>> {
        let state = self.state();
        let busy = state.hosts.iter().filter(|host| host.process.load_now().jobs > 0);
        busy.map(|host| host.process.clone()).collect()
    }
}

impl Host {
    fn has(&self, file: &File, generation: u64) -> bool {
        matches!(self.loaded.get(&file.identifier), Some(Ok(loaded)) if *loaded == generation)
    }
}

impl PoolState {
    /// The number of hosts that are reserved for one job.
    fn reserved(&self) -> usize {
        self.running().filter(|host| host.is_reserved).count()
    }

    /// Whether the only idle host is kept for a job that waits to run alone. Otherwise other jobs could always be faster, and
    /// that job would never start.
    fn keeps_an_idle_host(&self, max_hosts: usize) -> bool {
        let idle = self.running().filter(|host| !host.is_reserved && host.process.load_now().jobs == 0).count();
        !self.line.is_empty() && self.reserved() < max_hosts && idle == 1
    }

    fn drop_ended(&mut self) {
        self.hosts.retain(|host| !host.process.has_ended());
    }

    /// The hosts that take jobs.
    fn running(&self) -> impl Iterator<Item = &Host> {
        self.hosts.iter().filter(|host| host.process.load_now().takes_jobs)
    }

    /// Whether another host is starting, or can start.
    fn may_start(&self) -> bool {
        !self.is_closed && (self.is_starting || !self.failed_lately())
    }

    fn failed_lately(&self) -> bool {
        self.failure.as_ref().is_some_and(|(at, _)| at.elapsed() < START_PAUSE)
    }

    /// Why the file does not load, if no running host could load it.
    fn refusal(&self, file: &File) -> Option<String> {
        let refusals = self.running().map(|host| host.loaded.get(&file.identifier)?.as_ref().err().cloned());
        let why = refusals.collect::<Option<Vec<_>>>()?.pop()?;
        Some(format!("{} cannot be loaded: {why}", file.path()))
    }
}

/// Forgets hosts that have ended, and ends idle ones, except for one.
async fn supervise(pool: std::sync::Weak<Pool>) {
    loop {
        tokio::time::sleep(IDLE_INTERVAL).await;
        let Some(pool) = pool.upgrade() else { return };
        let mut state = pool.state();
        state.drop_ended();
        while state.running().count() > 1 {
            let Some(idle) = state.running().find(|host| host.process.idle_for() > IDLE_TIMEOUT) else { break };
            idle.process.retire();
        }
        if state.hosts.is_empty() {
            state.is_supervised = false;
            return;
        }
    }
}
