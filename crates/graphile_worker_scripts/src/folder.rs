//! Loads a folder of tasks, polls it for changes, and reloads it while a worker runs.
//!
//! The folder is polled, because file notifications do not work on all mounted volumes. `scan` decides which files are
//! tasks.

#[cfg(unix)]
use crate::executable;
use crate::host::{HostOptions, HostSettings, Hosts, NotLoaded};
#[cfg(unix)]
use crate::process_group::ProcessGroups;
use crate::scan::{Found, Kind, Scan, folder_error};
use futures_util::future::BoxFuture;
use graphile_worker::task_source::{FILE_POLL_INTERVAL, OpenTaskSource, TaskSourceSetup, is_stable};
use graphile_worker::{Error, JobDefinition};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

/// After a poll that took long (a large folder, a slow volume), the pause is this many times as long as the poll.
const PAUSE_PER_POLL: u32 = 10;

/// The delay before a host that did not start is retried: it doubles with each attempt, up to the maximum.
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LONGEST_RETRY: Duration = Duration::from_secs(60);

/// A folder that a worker has opened.
pub(crate) struct Folder {
    path: Arc<Path>,
    /// The names of tasks that are defined in code.
    in_code: BTreeSet<String>,
    /// Whether changed files are reloaded. If not, the folder only retries hosts that did not start.
    watch: bool,
    process_groups: ProcessGroups,
    hosts: Hosts,
    loaded: Mutex<Loaded>,
    watching: tokio::sync::Mutex<Watching>,
}

/// The tasks of a folder, and the files that they were loaded from.
#[derive(Clone, Default)]
struct Loaded {
    scan: Scan,
    tasks: BTreeMap<String, Arc<JobDefinition>>,
    problems: BTreeMap<PathBuf, String>,
    /// Tasks that are missing because their host did not start.
    without_host: BTreeSet<String>,
}

/// State that one poll passes on to the next.
struct Watching {
    /// The scan of the last poll, if it differs from what is loaded.
    next: Option<Scan>,
    pause: Duration,
    retry_at: Instant,
    retry_pause: Duration,
}

impl Watching {
    fn new() -> Watching {
        let mut watching =
            Watching { next: None, pause: FILE_POLL_INTERVAL, retry_at: Instant::now(), retry_pause: FIRST_RETRY };
        watching.reset_retry();
        watching
    }

    fn reset_retry(&mut self) {
        self.retry_pause = FIRST_RETRY;
        self.retry_at = Instant::now() + FIRST_RETRY;
    }

    fn next_retry(&mut self) {
        self.retry_pause = (self.retry_pause * 2).min(LONGEST_RETRY);
        self.retry_at = Instant::now() + self.retry_pause;
    }
}

impl Folder {
    pub(crate) async fn open(path: &Path, hosts: HostOptions, setup: TaskSourceSetup) -> Result<Folder, Error> {
        // The program may change its working directory later.
        let absolute =
            std::path::absolute(path).map_err(|error| folder_error(path, &format!("cannot be found: {error}")))?;
        let TaskSourceSetup { in_code, watch, .. } = setup.clone();
        let hosts = Hosts::new(&absolute, HostSettings { options: hosts, setup });
        let folder = Folder {
            path: absolute.into(),
            in_code,
            watch,
            process_groups: ProcessGroups::default(),
            hosts,
            loaded: Mutex::default(),
            watching: tokio::sync::Mutex::new(Watching::new()),
        };
        let scan = Scan::of(&folder.path, &folder.hosts.languages())?;
        let loaded = folder.load(scan, None).await;
        if loaded.tasks.is_empty() && folder.in_code.is_empty() {
            warn!(label = "worker", folder = %folder.path.display(), "the tasks folder contains no tasks");
        }
        loaded.log_missing(FIRST_RETRY);
        *folder.loaded() = loaded;
        Ok(folder)
    }

    fn loaded(&self) -> MutexGuard<'_, Loaded> {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns when the tasks have changed.
    async fn wait_for_change(&self) {
        let mut watching = self.watching.lock().await;
        loop {
            if !self.watch && self.loaded().without_host.is_empty() {
                return std::future::pending().await;
            }
            tokio::time::sleep(watching.pause).await;
            let began = Instant::now();
            let changed = (self.watch && self.poll(&mut watching).await) || self.retry_hosts(&mut watching).await;
            watching.pause = FILE_POLL_INTERVAL.max(began.elapsed() * PAUSE_PER_POLL);
            if changed {
                return;
            }
        }
    }

    /// Loads files that have changed. Returns whether the tasks have changed.
    async fn poll(&self, watching: &mut Watching) -> bool {
        let (path, languages) = (self.path.clone(), self.hosts.languages());
        let scanning = tokio::task::spawn_blocking(move || {
            Scan::of(&path, &languages).unwrap_or_else(|error| Scan::unreadable(&path, &error))
        });
        // It fails only if the runtime shuts down.
        let Ok(scan) = scanning.await else { return false };
        let before = self.loaded().clone();
        if !is_stable(&before.scan, &mut watching.next, &scan) {
            return false;
        }
        watching.reset_retry();
        self.load_again(scan, before).await
    }

    /// Loads the tasks that are missing because their host did not start.
    async fn retry_hosts(&self, watching: &mut Watching) -> bool {
        let before = self.loaded().clone();
        if before.without_host.is_empty() || watching.retry_at > Instant::now() {
            return false;
        }
        watching.next_retry();
        let changed = self.load_again(before.scan.clone(), before).await;
        self.loaded().log_missing(watching.retry_pause);
        changed
    }

    async fn load_again(&self, scan: Scan, before: Loaded) -> bool {
        let loaded = self.load(scan, Some(&before)).await;
        let changed = loaded.log_changes(&before);
        *self.loaded() = loaded;
        changed
    }

    /// Loads the files as tasks. A file that has not changed keeps its task.
    async fn load(&self, scan: Scan, before: Option<&Loaded>) -> Loaded {
        let mut loaded = Loaded { problems: scan.problems.clone(), scan, ..Loaded::default() };
        for (identifier, found) in &loaded.scan.tasks.clone() {
            if self.in_code.contains(identifier) {
                loaded.problems.insert(found.path.clone(), format!("{identifier} is defined in code"));
                continue;
            }
            match self.load_file(identifier, found, before, &mut loaded.without_host).await {
                Ok(task) => {
                    loaded.tasks.insert(identifier.clone(), task);
                }
                Err(problem) => {
                    loaded.problems.insert(found.path.clone(), problem);
                }
            }
        }
        for (identifier, _) in before.iter().flat_map(|before| &before.scan.tasks) {
            if !loaded.scan.tasks.contains_key(identifier) {
                self.hosts.unload(identifier);
            }
        }
        self.log_problems(&loaded.problems, before.map(|before| &before.problems));
        loaded
    }

    /// Loads the task of a file. Returns the previous task if the file has not changed or its new version does not load.
    async fn load_file(
        &self,
        identifier: &str,
        found: &Found,
        before: Option<&Loaded>,
        without_host: &mut BTreeSet<String>,
    ) -> Result<Arc<JobDefinition>, String> {
        let unchanged = before.filter(|before| before.scan.tasks.get(identifier) == Some(found));
        let old = before.and_then(|before| before.tasks.get(identifier));
        match (unchanged, old) {
            (Some(_), Some(task)) => return Ok(task.clone()),
            // The file was invalid, and still is.
            (Some(before), None) if !before.without_host.contains(identifier) => {
                return Err(before.problems.get(&found.path).cloned().unwrap_or_default());
            }
            _ => {}
        }
        let problem = match self.definition(identifier, found).await {
            Ok(definition) => return Ok(Arc::new(definition)),
            Err(NotLoaded::Refused(problem)) => problem,
            Err(NotLoaded::NoHost(problem)) => {
                if old.is_none() {
                    without_host.insert(identifier.to_owned());
                }
                problem
            }
        };
        let Some(old) = old.filter(|_| matches!(found.kind, Kind::Script(_))) else { return Err(problem) };
        let path = found.path.display();
        warn!(label = "worker", task_identifier = identifier, %path, problem, "the changed task cannot be loaded; keeping its previous version");
        Ok(old.clone())
    }

    async fn definition(&self, identifier: &str, found: &Found) -> Result<JobDefinition, NotLoaded> {
        match &found.kind {
            #[cfg(unix)]
            Kind::Executable => {
                if let Some(problem) = executable::interpreter_problem(&found.path) {
                    let path = found.path.display();
                    warn!(label = "worker", task_identifier = identifier, %path, problem, "the task will fail");
                }
                Ok(executable::definition(identifier, &found.path, &self.process_groups, self.hosts.database()))
            }
            #[cfg(not(unix))]
            Kind::Executable => Err(NotLoaded::Refused("cannot be run on this system".to_owned())),
            Kind::Script(language) => Ok(self.hosts.load(language, identifier, &found.path).await?.definition()),
            Kind::Skipped(reason) => Err(NotLoaded::Refused((*reason).to_owned())),
        }
    }

    /// Logs a line for each file whose problem is new.
    fn log_problems(&self, problems: &BTreeMap<PathBuf, String>, before: Option<&BTreeMap<PathBuf, String>>) {
        let is_new = |path: &PathBuf, problem: &String| before.is_none_or(|before| before.get(path) != Some(problem));
        for (path, problem) in problems.iter().filter(|(path, problem)| is_new(path, problem)) {
            let name = path.strip_prefix(&self.path).ok().filter(|name| !name.as_os_str().is_empty());
            let file = name.unwrap_or(path).display();
            warn!(label = "worker", %file, problem, "a file in the tasks folder is not a task");
        }
    }
}

impl Loaded {
    /// Logs which tasks are missing because their host did not start, and when the host is retried.
    fn log_missing(&self, retry: Duration) {
        if !self.without_host.is_empty() {
            let tasks = Vec::from_iter(self.without_host.iter().map(String::as_str)).join(", ");
            warn!(label = "worker", tasks, again_in = retry.as_secs(), "tasks are unavailable until their host starts");
        }
    }

    /// Logs every change since `before`. Returns whether there is one.
    fn log_changes(&self, before: &Loaded) -> bool {
        let log = |identifier: &str, change: &str| {
            info!(label = "worker", task_identifier = identifier, change, "task changed");
        };
        let mut changes = 0;
        for (identifier, task) in &self.tasks {
            match before.tasks.get(identifier) {
                None => log(identifier, "added"),
                Some(old) if !Arc::ptr_eq(old, task) => log(identifier, "changed"),
                Some(_) => continue,
            }
            changes += 1;
        }
        for identifier in before.tasks.keys().filter(|identifier| !self.tasks.contains_key(*identifier)) {
            log(identifier, "removed");
            changes += 1;
        }
        changes > 0
    }
}

impl OpenTaskSource for Folder {
    fn tasks(&self) -> Vec<JobDefinition> {
        self.loaded().tasks.values().map(|task| JobDefinition::clone(task)).collect()
    }

    fn missing(&self) -> BTreeSet<String> {
        self.loaded().without_host.clone()
    }

    fn changed(&self) -> BoxFuture<'_, ()> {
        Box::pin(self.wait_for_change())
    }

    fn end_jobs<'s>(&'s self, forced: &'s CancellationToken) -> BoxFuture<'s, ()> {
        Box::pin(async move {
            self.process_groups.wait_until_gone(forced).await;
            self.hosts.end_jobs(forced).await;
        })
    }

    fn stop(&self) -> BoxFuture<'_, ()> {
        Box::pin(self.hosts.stop())
    }

    fn kill(&self) {
        self.process_groups.kill();
    }
}

/// Without Unix there are no executables, and so no process groups.
#[cfg(not(unix))]
#[derive(Clone, Default)]
struct ProcessGroups;

#[cfg(not(unix))]
impl ProcessGroups {
    async fn wait_until_gone(&self, _forced: &CancellationToken) {}

    fn kill(&self) {}
}
