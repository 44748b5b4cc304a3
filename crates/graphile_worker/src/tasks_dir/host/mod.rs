//! Hosts: long-lived child processes that run task files of other languages. This file decides how many there are and
//! which one gets a job; `process` is one of them, `protocol` what is said, `language` what they are started with.
//!
//! ```text
//!   runner ── Script::task ── Pool::place ──► Process ══ socket ══ node, python, … ── your file
//! ```

mod language;
mod process;
mod protocol;

use crate::context::WorkerContext;
use crate::task::{Answer, BatchResult, Task, TaskError, TaskOptions, TaskOutcome, batch_answer};
pub(crate) use language::Language;
use language::OtherLanguage;
use process::{Ended, Launch, LoadError, Process, Run};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tracing::warn;

/// Of several hosts, one that had nothing to do for so long ends.
const IDLE_LIMIT: Duration = Duration::from_secs(30);

/// How often idle hosts are looked for.
const IDLE_INTERVAL: Duration = Duration::from_secs(5);

/// How long after a host could not be started nobody tries again.
const START_PAUSE: Duration = Duration::from_secs(1);

/// How often a job that waits for a host to be started looks whether one of the others has time again.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// How long a task has to end by itself once it was told that its timeout has passed.
const TIME_TO_NOTICE: Duration = Duration::from_millis(500);

/// How long after the worker began to leave a task is told so at the latest: as long as Node's worker waits.
const LONGEST_SILENCE: Duration = Duration::from_secs(5);

/// How hosts of task files are run: which programs, how many, how large.
///
/// ```
/// use graphile_worker::HostOptions;
///
/// let options = HostOptions::default().node("/opt/node22/bin/node").max_hosts(4);
/// ```
#[derive(Debug, Clone)]
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
    /// The Node that runs JavaScript and TypeScript (default: `node` on the PATH; at least 18).
    pub fn node(mut self, program: impl Into<PathBuf>) -> HostOptions {
        self.node = Some(program.into());
        self
    }

    /// The Python that runs Python files (default: that of `VIRTUAL_ENV`, of a `.venv` beside or above the folder of
    /// the tasks, else `python3` on the PATH; at least 3.9).
    pub fn python(mut self, program: impl Into<PathBuf>) -> HostOptions {
        self.python = Some(program.into());
        self
    }

    /// How many hosts of a language may run at once (default: the number of cores). A second one is started only when
    /// the first has no time left.
    pub fn max_hosts(mut self, hosts: usize) -> HostOptions {
        self.max_hosts = Some(hosts.max(1));
        self
    }

    /// A host that holds more memory than this many bytes is killed, and the jobs in it have failed (default 4 GiB;
    /// `None`: no limit). Only where the system has `/proc`.
    pub fn memory_limit(mut self, bytes: Option<u64>) -> HostOptions {
        self.memory_limit = bytes;
        self
    }

    /// Runs files with these endings by a host of your own, which is started by this command and speaks the protocol
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

    /// All languages that files may be written in. Where several files differ only in their endings, the first
    /// language, and of its endings the first, is meant.
    pub(crate) fn languages(&self) -> Vec<Language> {
        let others = self.others.iter().cloned().map(Language::Other);
        [Language::JavaScript, Language::Python].into_iter().chain(others).collect()
    }
}

/// What all hosts of a worker have in common.
pub(crate) struct HostSettings {
    pub(crate) options: HostOptions,
    pub(crate) database_url: String,
    pub(crate) schema: String,
    pub(crate) concurrency: usize,
    /// How many connections the pool of the tasks in a host may have.
    pub(crate) max_pool_size: u32,
    pub(crate) shutdown_grace_period: Duration,
}

/// The hosts of a worker, of all languages. When it is dropped, they end.
pub(crate) struct Hosts {
    settings: Arc<HostSettings>,
    tasks_dir: Arc<Path>,
    pools: Mutex<HashMap<Language, Arc<Pool>>>,
}

impl Hosts {
    pub(crate) fn new(tasks_dir: &Path, settings: HostSettings) -> Hosts {
        Hosts { settings: Arc::new(settings), tasks_dir: tasks_dir.into(), pools: Mutex::default() }
    }

    /// The languages that there are hosts for.
    pub(crate) fn languages(&self) -> Vec<Language> {
        self.settings.options.languages()
    }

    /// Loads a task's file, or its new version. Jobs that run go on with the old one; where the new one does not load,
    /// so do all others.
    pub(crate) async fn load(&self, language: &Language, identifier: &str, path: &Path) -> Result<Script, String> {
        let (pool, name, file) = (self.pool(language), identifier.to_owned(), path.to_owned());
        // On its own: whoever waits for it may be dropped, and a host that is half started must not be left like that.
        let loading = tokio::spawn(async move { pool.load(&name, &file).await });
        let script = loading.await.map_err(|error| error.to_string())??;
        // Its file may have been one of another language before.
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

    /// Ends all hosts, and returns when they have. The next job starts one again.
    pub(crate) async fn stop(&self) {
        let pools: Vec<Arc<Pool>> = self.lock().values().cloned().collect();
        futures_util::future::join_all(pools.iter().map(|pool| pool.stop())).await;
    }

    /// Ends the hosts in which there are jobs that nobody waits for any more, and returns when they have; when somebody
    /// insists, they are killed at once.
    pub(crate) async fn end_jobs(&self, insisted: &CancellationToken) {
        let pools: Vec<Arc<Pool>> = self.lock().values().cloned().collect();
        let busy: Vec<Arc<Process>> = pools.iter().flat_map(|pool| pool.busy()).collect();
        busy.iter().for_each(|process| process.end());
        let ended = futures_util::future::join_all(busy.iter().map(|process| process.ended()));
        let mut ended = pin!(ended);
        tokio::select! {
            _ = &mut ended => {}
            () = insisted.cancelled() => {
                busy.iter().for_each(|process| process.hurry());
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

/// A task that hosts run.
#[derive(Clone)]
pub(crate) struct Script {
    file: Arc<File>,
    pool: Arc<Pool>,
}

impl Script {
    /// The task, for a worker. It runs the newest version that was loaded.
    pub(crate) fn task(&self) -> Task {
        let script = self.clone();
        Task {
            identifier: self.file.identifier.clone(),
            options: TaskOptions::default(),
            time_to_notice: TIME_TO_NOTICE,
            run: Arc::new(move |ctx| {
                let script = script.clone();
                Box::pin(async move { script.run(ctx).await })
            }),
        }
    }

    async fn run(self, ctx: WorkerContext) -> Answer {
        let run = match self.pool.begin(&self.file, &ctx).await {
            Ok(run) => run,
            Err(why) => return Err(TaskError::new(why)).into(),
        };
        match run.ended(self.must_stop(&ctx)).await {
            Ended::Done => Ok(TaskOutcome::Done).into(),
            Ended::Failed(problem) => Err(TaskError::new(problem.text())).into(),
            Ended::FailedItems(failed) => {
                let items: Vec<Box<serde_json::value::RawValue>> =
                    serde_json::from_str(ctx.payload().get()).unwrap_or_default();
                let results = protocol::item_results(items.len(), failed);
                batch_answer(&items, BatchResult::Each(results))
            }
            Ended::WithHost(why) => Err(TaskError::new(&*why)).into(),
        }
    }
}

impl Script {
    /// Returns when a job is to be told to stop: when its time is up, and some time after the worker began to leave. Until
    /// then it may well finish; code that was told mostly fails.
    async fn must_stop(&self, ctx: &WorkerContext) {
        let half_time = self.pool.settings.shutdown_grace_period / 2;
        let leaving = async {
            ctx.cancellation_token().cancelled().await;
            tokio::time::sleep(half_time.min(LONGEST_SILENCE)).await;
        };
        tokio::select! {
            () = ctx.must_end() => {}
            () = leaving => {}
        }
    }
}

/// A task's file.
struct File {
    identifier: Arc<str>,
    /// The version that new jobs run; 0 before the first was loaded.
    generation: AtomicU64,
    /// The last version that was tried.
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
    /// Notified when a host has come, or could not.
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
    is_looked_after: bool,
    /// How often all hosts were told to end: one that was being started then is not wanted either.
    stops: u64,
    /// When a host could not be started, and why.
    failure: Option<(Instant, String)>,
}

/// A host and what is loaded in it: the version of each task, or why it is not.
struct Host {
    process: Arc<Process>,
    loaded: HashMap<Arc<str>, Result<u64, String>>,
}

/// Where a job goes.
enum Place {
    Begun(Run),
    /// Nowhere yet: a host is being started.
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
        // Nothing in here leaves the state half changed when it panics.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a job to a host, when there is one.
    async fn begin(self: &Arc<Self>, file: &Arc<File>, ctx: &WorkerContext) -> Result<Run, String> {
        loop {
            match self.place(file, ctx) {
                Place::Begun(run) => return Ok(run),
                // Should it change just before, the next look will do.
                Place::Later => drop(tokio::time::timeout(LOOK_INTERVAL, self.changed.notified()).await),
                Place::Nowhere(why) => return Err(why),
            }
        }
    }

    fn place(self: &Arc<Self>, file: &Arc<File>, ctx: &WorkerContext) -> Place {
        let mut state = self.state();
        if !state.files.contains_key(&file.identifier) {
            return Place::Nowhere(format!("{} is no task any more", file.path()));
        }
        let generation = file.generation.load(Ordering::Acquire);
        let has_it =
            |host: &Host| matches!(host.loaded.get(&file.identifier), Some(Ok(loaded)) if *loaded == generation);
        let (begun, has_time, alive) = loop {
            let loads = state.hosts.iter().map(|host| (host, host.process.load_now()));
            let mut alive = 0;
            let running = loads.filter(|(_, load)| load.takes_jobs).inspect(|_| alive += 1);
            let able = running.filter(|(host, _)| has_it(host));
            let Some((host, load)) = able.min_by_key(|(_, load)| (load.blocked_for, load.jobs)) else {
                break (None, false, alive);
            };
            if load.is_blocked() && alive < self.max_hosts && state.may_start() {
                // Behind a job that never ends it would wait for ever. The next host is there in a moment.
                break (None, false, alive);
            }
            // It may have ended since it was asked; then the others are.
            if let Some(run) = host.process.begin(&file.identifier, generation, ctx) {
                let has_time = load.jobs == 0 || !(load.is_blocked() || load.is_busy);
                break (Some(run), has_time, alive);
            }
        };
        let refusal = (begun.is_none() && alive > 0).then(|| state.refusal(file)).flatten();
        if refusal.is_none() && !has_time && alive < self.max_hosts {
            self.start_another(&mut state);
        }
        match (begun, refusal, &state.failure) {
            (Some(run), ..) => Place::Begun(run),
            (None, Some(why), _) => Place::Nowhere(why),
            (None, None, _) if state.is_starting => Place::Later,
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
            // Whoever loaded a file meanwhile may have started one.
            if pool.state().running().count() < pool.max_hosts {
                pool.start_host().await;
            } else {
                pool.state().is_starting = false;
                pool.changed.notify_waiters();
            }
        });
    }

    /// Starts a host with all files loaded in it. `loading` is held.
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
                    if !std::mem::replace(&mut state.is_looked_after, true) {
                        tokio::spawn(look_after(Arc::downgrade(self)));
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

    /// A host in which every file that loads is loaded. A file that ends the process is left out of the next try.
    async fn started_host(&self) -> Result<Host, String> {
        let command = self.language.command(&self.settings.options, &self.tasks_dir).await?;
        let launch = Arc::new(Launch {
            language: self.language.clone(),
            command,
            tasks_dir: self.tasks_dir.to_string_lossy().into_owned(),
            database_url: self.settings.database_url.clone(),
            schema: self.settings.schema.clone(),
            concurrency: self.settings.concurrency,
            max_pool_size: self.settings.max_pool_size,
            memory_limit: self.settings.options.memory_limit,
        });
        let mut fatal: HashMap<Arc<str>, String> = HashMap::new();
        loop {
            let process = Process::start(launch.clone()).await?;
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
                    Err(LoadError::Refused(why)) => {
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
                None => return Ok(Host { process, loaded }),
                Some(why) if fatal.len() == before => return Err(why.to_string()),
                Some(_) => {}
            }
        }
    }

    /// Loads a file, or its new version, in all hosts.
    async fn load(self: &Arc<Self>, identifier: &str, path: &Path) -> Result<Script, String> {
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
        // A host that ends meanwhile, over this file or another reason, is replaced once.
        for _ in 0..2 {
            if !self.has_host() {
                // What keeps it from starting would keep it at the next file, and take as long.
                if !self.state().failed_lately() {
                    self.start_host().await;
                }
                if let (false, Some((_, why))) = (self.has_host(), &self.state().failure) {
                    return Err(why.clone());
                }
            }
            match self.load_in_hosts(&file, &path, generation).await {
                Ok(()) => {
                    *file.path.lock().unwrap_or_else(PoisonError::into_inner) = path;
                    file.generation.store(generation, Ordering::Release);
                    self.state().files.insert(file.identifier.clone(), file.clone());
                    return Ok(Script { file, pool: self.clone() });
                }
                Err(LoadError::Refused(why)) => return Err(why),
                Err(LoadError::HostGone(why)) => problem = Some(why.to_string()),
            }
        }
        Err(problem.unwrap_or_default())
    }

    fn has_host(&self) -> bool {
        let mut state = self.state();
        state.drop_ended();
        state.running().next().is_some()
    }

    /// Loads a version in all hosts; fine where one of them has it.
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
                // Where others have the new version, jobs go to those.
                behind.push(process.clone());
            }
            match (&ended, &result) {
                (Ok(()), _) | (Err(LoadError::Refused(_)), Err(_)) => {}
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

impl PoolState {
    fn drop_ended(&mut self) {
        self.hosts.retain(|host| !host.process.has_ended());
    }

    /// Those that take jobs.
    fn running(&self) -> impl Iterator<Item = &Host> {
        self.hosts.iter().filter(|host| host.process.load_now().takes_jobs)
    }

    /// Whether another host is being started, or can be.
    fn may_start(&self) -> bool {
        !self.is_closed && (self.is_starting || !self.failed_lately())
    }

    fn failed_lately(&self) -> bool {
        self.failure.as_ref().is_some_and(|(at, _)| at.elapsed() < START_PAUSE)
    }

    /// Why no host has a file, if that is known of all of them.
    fn refusal(&self, file: &File) -> Option<String> {
        let refusals = self.running().map(|host| host.loaded.get(&file.identifier)?.as_ref().err().cloned());
        let why = refusals.collect::<Option<Vec<_>>>()?.pop()?;
        Some(format!("{} cannot be loaded: {why}", file.path()))
    }
}

/// Forgets hosts that have ended; ends those that are not needed any more, but for one.
async fn look_after(pool: std::sync::Weak<Pool>) {
    loop {
        tokio::time::sleep(IDLE_INTERVAL).await;
        let Some(pool) = pool.upgrade() else { return };
        let mut state = pool.state();
        state.drop_ended();
        while state.running().count() > 1 {
            let Some(idle) = state.running().find(|host| host.process.idle_for() > IDLE_LIMIT) else { break };
            idle.process.retire();
        }
        if state.hosts.is_empty() {
            state.is_looked_after = false;
            return;
        }
    }
}
