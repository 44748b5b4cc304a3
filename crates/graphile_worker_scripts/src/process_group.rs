//! A process with all that it starts: told to stop together, killed together, and nothing stays behind, also where
//! whoever waits for it is dropped, or the worker is killed.

use crate::output::{LastLines, Output};
use rustix::process::{Pid, Signal, kill_process_group, test_kill_process_group};
use std::collections::HashSet;
use std::io::{self, Write};
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::process::{Child, ChildStdin, Command};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{Instrument, Span, warn};

/// So long a group has between being told to stop and being killed.
pub(crate) const TERM_GRACE: Duration = Duration::from_secs(3);

/// How long a killed process may take to be gone; one that waits for a broken disk may take for ever.
const KILL_TIMEOUT: Duration = Duration::from_secs(1);

/// How long to read what a group that is gone has left to be read; whoever has left the group may hold it open for ever.
const OUTPUT_DRAIN_TIMEOUT: Duration = Duration::from_millis(250);

/// So much longer than that a group is waited for: handlers that never wait may leave no thread to end it.
const RUNTIME_SLACK: Duration = Duration::from_millis(500);

/// How often a group that was told to stop is looked at.
const EXIT_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The groups of a worker: which there are, and those of them that nobody waits for any more and that are being ended.
#[derive(Clone, Default)]
pub(crate) struct ProcessGroups {
    ending: TaskTracker,
    at_once: CancellationToken,
    groups: Arc<Mutex<Groups>>,
}

impl ProcessGroups {
    /// Returns when all that are being ended are gone; when somebody insists they are killed at once. Does not wait for
    /// ever.
    pub(crate) async fn wait_until_gone(&self, forced: &CancellationToken) {
        self.ending.close();
        let in_peace = tokio::select! {
            wait_until_gone = timeout(TERM_GRACE + KILL_TIMEOUT + OUTPUT_DRAIN_TIMEOUT + RUNTIME_SLACK, self.ending.wait()) => wait_until_gone.is_ok(),
            () = forced.cancelled() => false,
        };
        if !in_peace {
            if forced.is_cancelled() {
                self.at_once.cancel();
            }
            self.kill();
            let _ = timeout(KILL_TIMEOUT + OUTPUT_DRAIN_TIMEOUT + RUNTIME_SLACK, self.ending.wait()).await;
        }
        self.ending.reopen();
    }

    /// Kills all groups that there are, those that run as well.
    pub(crate) fn kill(&self) {
        for id in self.groups.lock().unwrap_or_else(PoisonError::into_inner).alive.iter() {
            let _ = kill_process_group(*id, Signal::KILL);
        }
    }
}

/// The groups of a worker that are alive, and who kills them if the worker is killed.
#[derive(Default)]
struct Groups {
    alive: HashSet<Pid>,
    watchdog: Option<Watchdog>,
}

impl Groups {
    /// Before there is anything to survive: a program does not wait.
    fn ensure_watchdog(&mut self) {
        if self.watchdog.is_none() {
            self.watchdog = Watchdog::of(&self.alive)
                .inspect_err(|error| warn!(%error, "if this worker is killed, its programs will run on"))
                .ok();
        }
    }

    fn add(&mut self, id: Pid) {
        self.alive.insert(id);
        if !self.tell('+', id) {
            // Somebody has killed it.
            self.watchdog = None;
            self.ensure_watchdog();
        }
    }

    fn remove(&mut self, id: Pid) {
        self.alive.remove(&id);
        self.tell('-', id);
    }

    fn tell(&mut self, sign: char, id: Pid) -> bool {
        self.watchdog.as_mut().is_some_and(|watchdog| watchdog.tell(sign, id).is_ok())
    }
}

/// A shell that is told which groups are alive, and kills them when it hears nothing more because the worker is gone.
struct Watchdog {
    told: io::PipeWriter,
    /// Waited for when it has ended, by the runtime.
    _shell: Child,
}

impl Watchdog {
    const SCRIPT: &str = "trap '' HUP INT TERM; groups=' '; \
        while read -r sign group; do case $sign in \
            +) groups=\"$groups$group \" ;; \
            -) groups=\"${groups%% $group *} ${groups#* $group }\" ;; \
        esac; done; \
        for group in $groups; do kill -s KILL -- \"-$group\"; done";

    fn of(alive: &HashSet<Pid>) -> io::Result<Watchdog> {
        let (hears, told) = io::pipe()?;
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", Watchdog::SCRIPT, "graphile-worker-survivor"]).current_dir("/").process_group(0);
        let _shell = shell.stdin(hears).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
        let mut watchdog = Watchdog { told, _shell };
        alive.iter().try_for_each(|id| watchdog.tell('+', *id))?;
        Ok(watchdog)
    }

    fn tell(&mut self, sign: char, id: Pid) -> io::Result<()> {
        // In one piece: it must not be killed over half a number.
        self.told.write_all(format!("{sign} {}\n", id.as_raw_nonzero()).as_bytes())
    }
}

/// The number of a group, listed among those of its worker until it is dropped.
struct RegisteredGroup {
    id: Pid,
    groups: Arc<Mutex<Groups>>,
}

impl RegisteredGroup {
    fn new(id: Pid, process_groups: &ProcessGroups) -> RegisteredGroup {
        let groups = process_groups.groups.clone();
        groups.lock().unwrap_or_else(PoisonError::into_inner).add(id);
        RegisteredGroup { id, groups }
    }

    fn signal(&self, signal: Signal) {
        // It fails where nobody is left.
        let _ = kill_process_group(self.id, signal);
    }
}

impl Drop for RegisteredGroup {
    fn drop(&mut self) {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner).remove(self.id);
    }
}

/// A process and its offspring, as far as that has not left its group, with what they write. Dropped, all of it is ended.
pub(crate) struct ProcessGroup {
    alive: Option<Alive>,
    process_groups: ProcessGroups,
    /// Where what it writes belongs.
    span: Span,
}

struct Alive {
    leader: Child,
    output: Output,
    group: RegisteredGroup,
}

impl ProcessGroup {
    /// Starts a program in a group of its own.
    pub(crate) fn start(command: &mut Command, process_groups: &ProcessGroups) -> io::Result<ProcessGroup> {
        process_groups.groups.lock().unwrap_or_else(PoisonError::into_inner).ensure_watchdog();
        let mut leader = command.process_group(0).spawn()?;
        let id = leader.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        let id = id.ok_or_else(|| io::Error::other("the process has no id"))?;
        let output = Output::of(&mut leader);
        let alive = Some(Alive { leader, output, group: RegisteredGroup::new(id, process_groups) });
        Ok(ProcessGroup { alive, process_groups: process_groups.clone(), span: Span::current() })
    }

    /// The input of its first process, for whoever asks first.
    pub(crate) fn stdin(&mut self) -> Option<ChildStdin> {
        self.alive.as_mut()?.leader.stdin.take()
    }

    /// Logs what it writes, and returns when its first process has exited.
    pub(crate) async fn exited(&mut self) -> io::Result<ExitStatus> {
        match &mut self.alive {
            Some(Alive { leader, output, .. }) => output.logged_during(leader.wait()).await,
            None => Err(io::Error::other("the process was ended")),
        }
    }

    /// Logs what it writes, and returns when nobody can write any more.
    pub(crate) async fn output_closed(&mut self) {
        if let Some(Alive { output, .. }) = &mut self.alive {
            output.closed().await;
        }
    }

    /// Tells all of it to stop, kills what does not, and returns its last lines on standard error when it is gone.
    pub(crate) async fn end(mut self) -> LastLines {
        let Some(ending) = self.begin_to_end() else { return LastLines::default() };
        // On its own: whoever waits for it may be dropped.
        let ended = self.process_groups.ending.spawn(ending.run().instrument(self.span.clone()));
        ended.await.unwrap_or_default()
    }

    /// Leaves alone what is left of it, and returns its last lines on standard error.
    pub(crate) fn release(mut self) -> LastLines {
        self.alive.take().map(|alive| alive.output.end()).unwrap_or_default()
    }

    /// Tells all of it to stop, before anything else: the runtime may have no time for the rest.
    fn begin_to_end(&mut self) -> Option<Ending> {
        let alive = self.alive.take()?;
        alive.group.signal(Signal::TERM);
        Some(Ending { alive: Some(alive), at_once: self.process_groups.at_once.clone() })
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        if let Some(ending) = self.begin_to_end()
            // Without a runtime it is killed by being dropped.
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            self.process_groups.ending.spawn_on(ending.run().instrument(self.span.clone()), &runtime);
        }
    }
}

/// A group that was told to stop. Dropped, it is killed.
struct Ending {
    alive: Option<Alive>,
    at_once: CancellationToken,
}

impl Ending {
    async fn run(mut self) -> LastLines {
        let Some(Alive { leader, output, group }) = &mut self.alive else { return LastLines::default() };
        // Who says goodbye to a closed pipe is killed by it.
        let in_time = output.logged_during(async {
            tokio::select! {
                () = wait_until_gone(leader, group.id) => true,
                () = tokio::time::sleep(TERM_GRACE) => false,
                () = self.at_once.cancelled() => false,
            }
        });
        if !in_time.await {
            group.signal(Signal::KILL);
            let _ = output.logged_during(timeout(KILL_TIMEOUT, wait_until_gone(leader, group.id))).await;
        }
        let _ = timeout(OUTPUT_DRAIN_TIMEOUT, output.closed()).await;
        self.alive.take().map(|alive| alive.output.end()).unwrap_or_default()
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        if let Some(alive) = &self.alive {
            alive.group.signal(Signal::KILL);
        }
    }
}

/// Returns when none of its processes is left. The number of a group is not given to another as long as it has a
/// process, and a number that has just become free is the last to be given again.
async fn wait_until_gone(leader: &mut Child, id: Pid) {
    let _ = leader.wait().await;
    while test_kill_process_group(id).is_ok() {
        tokio::time::sleep(EXIT_POLL_INTERVAL).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_group_that_is_dropped_is_told_to_stop_once() {
        let folder = std::env::temp_dir().join(format!("graphile_worker_group_{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let told = || std::fs::read_to_string(folder.join("told")).unwrap_or_default();
        let wait_until = |done: &dyn Fn() -> bool| {
            let patience = std::time::Instant::now() + Duration::from_secs(30);
            while !done() {
                assert!(std::time::Instant::now() < patience);
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        let script =
            "n=0; trap 'n=$((n + 1)); echo $n > told' TERM; echo 0 > told; until [ -e go ]; do sleep 0.01; done";
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]).current_dir(&folder).stdout(Stdio::null()).stderr(Stdio::null());
        let process_groups = ProcessGroups::default();
        let group = ProcessGroup::start(&mut command, &process_groups).unwrap();
        wait_until(&|| told() == "0\n");
        drop(group);
        // The runtime has this thread only: nobody has begun to wait for the group yet.
        wait_until(&|| told() == "1\n");
        let forced = CancellationToken::new();
        tokio::join!(process_groups.wait_until_gone(&forced), async {
            for _ in 0..10 {
                tokio::task::yield_now().await;
            }
            std::fs::write(folder.join("go"), "").unwrap();
        });
        assert_eq!(told(), "1\n");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
