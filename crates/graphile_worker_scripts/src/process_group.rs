//! Process groups: a program and its child processes are stopped and killed together. No process remains, even if the
//! caller is dropped or the worker is killed.

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

/// How long a group has to exit after SIGTERM before it is killed.
pub(crate) const TERM_GRACE: Duration = Duration::from_secs(3);

/// How long to wait for a killed process to exit. A process that waits for a broken disk may never exit.
const KILL_TIMEOUT: Duration = Duration::from_secs(1);

/// How long to read the remaining output of a group that has exited. A process that has left the group may keep the output
/// open forever.
const OUTPUT_DRAIN_TIMEOUT: Duration = Duration::from_millis(250);

/// Additional time to wait for groups to end, because handlers that block may leave no thread of the runtime free.
const RUNTIME_SLACK: Duration = Duration::from_millis(500);

/// How often to check whether a group has exited.
const EXIT_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The process groups of a worker, including those that are being stopped in the background.
#[derive(Clone, Default)]
pub(crate) struct ProcessGroups {
    stopping: TaskTracker,
    kill_now: CancellationToken,
    groups: Arc<Mutex<Groups>>,
}

impl ProcessGroups {
    /// Waits, for a limited time, until all groups that are being stopped have exited. If `forced` is cancelled, kills them
    /// at once.
    pub(crate) async fn wait_until_gone(&self, forced: &CancellationToken) {
        self.stopping.close();
        let all_exited = tokio::select! {
            waited = timeout(TERM_GRACE + KILL_TIMEOUT + OUTPUT_DRAIN_TIMEOUT + RUNTIME_SLACK, self.stopping.wait()) => waited.is_ok(),
            () = forced.cancelled() => false,
        };
        if !all_exited {
            if forced.is_cancelled() {
                self.kill_now.cancel();
            }
            self.kill();
            let _ = timeout(KILL_TIMEOUT + OUTPUT_DRAIN_TIMEOUT + RUNTIME_SLACK, self.stopping.wait()).await;
        }
        self.stopping.reopen();
    }

    /// Kills all groups, including those of running jobs.
    pub(crate) fn kill(&self) {
        for id in self.groups.lock().unwrap_or_else(PoisonError::into_inner).alive.iter() {
            let _ = kill_process_group(*id, Signal::KILL);
        }
    }
}

/// The running groups of a worker, and the watchdog that kills them if the worker is killed.
#[derive(Default)]
struct Groups {
    alive: HashSet<Pid>,
    watchdog: Option<Watchdog>,
}

impl Groups {
    /// Starts the watchdog, if it does not run. Called before a program starts.
    fn ensure_watchdog(&mut self) {
        if self.watchdog.is_none() {
            self.watchdog = Watchdog::of(&self.alive)
                .inspect_err(|error| warn!(%error, "cannot start the watchdog; if this worker is killed, its programs continue to run"))
                .ok();
        }
    }

    fn add(&mut self, id: Pid) {
        self.alive.insert(id);
        if !self.send('+', id) {
            // The watchdog was killed.
            self.watchdog = None;
            self.ensure_watchdog();
        }
    }

    fn remove(&mut self, id: Pid) {
        self.alive.remove(&id);
        self.send('-', id);
    }

    fn send(&mut self, sign: char, id: Pid) -> bool {
        self.watchdog.as_mut().is_some_and(|watchdog| watchdog.send(sign, id).is_ok())
    }
}

/// A shell that reads from a pipe which groups are running. If the worker dies, the pipe closes, and the shell kills them.
struct Watchdog {
    pipe: io::PipeWriter,
    /// The runtime reaps it when it exits.
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
        let (reader, pipe) = io::pipe()?;
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", Watchdog::SCRIPT, "graphile-worker-watchdog"]).current_dir("/").process_group(0);
        let _shell = shell.stdin(reader).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
        let mut watchdog = Watchdog { pipe, _shell };
        alive.iter().try_for_each(|id| watchdog.send('+', *id))?;
        Ok(watchdog)
    }

    fn send(&mut self, sign: char, id: Pid) -> io::Result<()> {
        // One write for the whole line: the shell must never act on half a number.
        self.pipe.write_all(format!("{sign} {}\n", id.as_raw_nonzero()).as_bytes())
    }
}

/// The id of a running group. Dropping it removes the group from the worker's list.
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
        // It fails if no process of the group is left.
        let _ = kill_process_group(self.id, signal);
    }
}

impl Drop for RegisteredGroup {
    fn drop(&mut self) {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner).remove(self.id);
    }
}

/// A process with its child processes and their output. Child processes that have left the group are not included. Dropping
/// it stops the group.
pub(crate) struct ProcessGroup {
    alive: Option<Alive>,
    process_groups: ProcessGroups,
    /// The span in which its output is logged.
    span: Span,
}

struct Alive {
    leader: Child,
    output: Output,
    group: RegisteredGroup,
}

impl ProcessGroup {
    /// Starts a program in a new group.
    pub(crate) fn start(command: &mut Command, process_groups: &ProcessGroups) -> io::Result<ProcessGroup> {
        process_groups.groups.lock().unwrap_or_else(PoisonError::into_inner).ensure_watchdog();
        let mut leader = command.process_group(0).spawn()?;
        let id = leader.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        let id = id.ok_or_else(|| io::Error::other("the process has no id"))?;
        let output = Output::of(&mut leader);
        let alive = Some(Alive { leader, output, group: RegisteredGroup::new(id, process_groups) });
        Ok(ProcessGroup { alive, process_groups: process_groups.clone(), span: Span::current() })
    }

    /// Takes the standard input of the first process. `None` after the first call.
    pub(crate) fn stdin(&mut self) -> Option<ChildStdin> {
        self.alive.as_mut()?.leader.stdin.take()
    }

    /// Logs the output, and returns when the first process has exited.
    pub(crate) async fn exited(&mut self) -> io::Result<ExitStatus> {
        match &mut self.alive {
            Some(Alive { leader, output, .. }) => output.logged_during(leader.wait()).await,
            None => Err(io::Error::other("the process group was stopped")),
        }
    }

    /// Logs the output, and returns when it is closed.
    pub(crate) async fn output_closed(&mut self) {
        if let Some(Alive { output, .. }) = &mut self.alive {
            output.closed().await;
        }
    }

    /// Asks the group to end: sends SIGTERM.
    pub(crate) fn terminate(&self) {
        if let Some(alive) = &self.alive {
            alive.group.signal(Signal::TERM);
        }
    }

    /// Stops the group: sends SIGTERM, then SIGKILL to processes that do not exit. Returns its last lines on standard error.
    pub(crate) async fn stop(mut self) -> LastLines {
        let Some(stopping) = self.begin_stop() else { return LastLines::default() };
        // In a task of its own, because the caller may be dropped.
        let stopped = self.process_groups.stopping.spawn(stopping.run().instrument(self.span.clone()));
        stopped.await.unwrap_or_default()
    }

    /// Leaves the remaining processes running, and returns the group's last lines on standard error.
    pub(crate) fn release(mut self) -> LastLines {
        self.alive.take().map(|alive| alive.output.end()).unwrap_or_default()
    }

    /// Sends SIGTERM at once, because the runtime may be too busy to run the rest soon.
    fn begin_stop(&mut self) -> Option<Stopping> {
        let alive = self.alive.take()?;
        alive.group.signal(Signal::TERM);
        Some(Stopping { alive: Some(alive), kill_now: self.process_groups.kill_now.clone() })
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        if let Some(stopping) = self.begin_stop()
            // Without a runtime, `stopping` is dropped, which kills the group.
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            self.process_groups.stopping.spawn_on(stopping.run().instrument(self.span.clone()), &runtime);
        }
    }
}

/// A group that has received SIGTERM. Dropping it kills the group.
struct Stopping {
    alive: Option<Alive>,
    kill_now: CancellationToken,
}

impl Stopping {
    async fn run(mut self) -> LastLines {
        let Some(Alive { leader, output, group }) = &mut self.alive else { return LastLines::default() };
        // The output stays open: a process that writes to a closed pipe while it cleans up would be killed by SIGPIPE.
        let in_time = output.logged_during(async {
            tokio::select! {
                () = wait_until_gone(leader, group.id) => true,
                () = tokio::time::sleep(TERM_GRACE) => false,
                () = self.kill_now.cancelled() => false,
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

impl Drop for Stopping {
    fn drop(&mut self) {
        if let Some(alive) = &self.alive {
            alive.group.signal(Signal::KILL);
        }
    }
}

/// Returns when all processes of the group have exited. The system does not reuse the id of a group that has a process, and
/// reuses an id that has just become free last.
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
    async fn a_dropped_group_receives_sigterm_once() {
        let folder = std::env::temp_dir().join(format!("graphile_worker_group_{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let signals = || std::fs::read_to_string(folder.join("signals")).unwrap_or_default();
        let wait_until = |done: &dyn Fn() -> bool| {
            let deadline = std::time::Instant::now() + Duration::from_secs(30);
            while !done() {
                assert!(std::time::Instant::now() < deadline);
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        let script =
            "n=0; trap 'n=$((n + 1)); echo $n > signals' TERM; echo 0 > signals; until [ -e go ]; do sleep 0.01; done";
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]).current_dir(&folder).stdout(Stdio::null()).stderr(Stdio::null());
        let process_groups = ProcessGroups::default();
        let group = ProcessGroup::start(&mut command, &process_groups).unwrap();
        wait_until(&|| signals() == "0\n");
        drop(group);
        // The runtime has only this thread, so no task waits for the group yet.
        wait_until(&|| signals() == "1\n");
        let forced = CancellationToken::new();
        tokio::join!(process_groups.wait_until_gone(&forced), async {
            for _ in 0..10 {
                tokio::task::yield_now().await;
            }
            std::fs::write(folder.join("go"), "").unwrap();
        });
        assert_eq!(signals(), "1\n");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
