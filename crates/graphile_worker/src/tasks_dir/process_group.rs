//! A process with all that it starts: told to stop together, killed together, and nothing stays behind, also where
//! whoever waits for it is dropped.

use rustix::process::{Pid, Signal, kill_process_group, test_kill_process_group};
use std::io;
use std::process::ExitStatus;
use std::time::Duration;
use tokio::process::{Child, Command};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// So long a group has between being told to stop and being killed.
pub(crate) const TIME_TO_END: Duration = Duration::from_secs(3);

/// How long a killed process may take to be gone; one that waits for a broken disk may take for ever.
const TIME_TO_DIE: Duration = Duration::from_secs(1);

/// How often a group that was told to stop is looked at.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);

/// The groups of a worker that nobody waits for any more, and that are being ended.
#[derive(Clone, Default)]
pub(crate) struct Leftovers {
    ending: TaskTracker,
    at_once: CancellationToken,
}

impl Leftovers {
    /// Returns when all of them are gone; when somebody insists they are killed at once.
    pub(crate) async fn gone(&self, insisted: &CancellationToken) {
        self.ending.close();
        tokio::select! {
            () = self.ending.wait() => {}
            () = insisted.cancelled() => {
                self.at_once.cancel();
                self.ending.wait().await;
            }
        }
        self.ending.reopen();
    }
}

/// A process and its offspring, as far as that has not left its group. Dropped, all of it is ended.
pub(crate) struct ProcessGroup {
    leader: Option<Child>,
    id: Pid,
    leftovers: Leftovers,
}

impl ProcessGroup {
    /// Starts a program in a group of its own.
    pub(crate) fn start(command: &mut Command, leftovers: &Leftovers) -> io::Result<ProcessGroup> {
        let leader = command.process_group(0).spawn()?;
        let id = leader.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        let id = id.ok_or_else(|| io::Error::other("the process has no id"))?;
        Ok(ProcessGroup { leader: Some(leader), id, leftovers: leftovers.clone() })
    }

    /// Its first process; gone once the group was ended.
    pub(crate) fn leader(&mut self) -> Option<&mut Child> {
        self.leader.as_mut()
    }

    /// Returns when its first process has exited.
    pub(crate) async fn exited(&mut self) -> io::Result<ExitStatus> {
        match &mut self.leader {
            Some(leader) => leader.wait().await,
            None => Err(io::Error::other("the process was ended")),
        }
    }

    /// Tells all of it to stop, kills what does not, and returns when it is gone.
    pub(crate) async fn end(mut self) {
        if let Some(ending) = self.begin_to_end() {
            ending.run().await;
        }
    }

    /// Leaves alone what is left of it.
    pub(crate) fn release(mut self) {
        self.leader = None;
    }

    fn begin_to_end(&mut self) -> Option<Ending> {
        let leader = self.leader.take()?;
        Some(Ending { leader, id: self.id, at_once: self.leftovers.at_once.clone(), is_over: false })
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        if let Some(ending) = self.begin_to_end()
            // Without a runtime it is killed by being dropped.
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            // Before anything else: the runtime may have no time for it.
            ending.signal(Signal::TERM);
            self.leftovers.ending.spawn_on(ending.run(), &runtime);
        }
    }
}

/// A group on its way out. Dropped, it is killed.
struct Ending {
    leader: Child,
    id: Pid,
    at_once: CancellationToken,
    is_over: bool,
}

impl Ending {
    async fn run(mut self) {
        self.signal(Signal::TERM);
        let at_once = self.at_once.clone();
        let in_time = tokio::select! {
            () = self.gone() => true,
            () = tokio::time::sleep(TIME_TO_END) => false,
            () = at_once.cancelled() => false,
        };
        if !in_time {
            self.signal(Signal::KILL);
        }
        let _ = tokio::time::timeout(TIME_TO_DIE, self.leader.wait()).await;
        self.is_over = true;
    }

    /// Returns when none of its processes is left. The number of a group is not given to another as long as it has a
    /// process, and a number that has just become free is the last to be given again.
    async fn gone(&mut self) {
        let _ = self.leader.wait().await;
        while test_kill_process_group(self.id).is_ok() {
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    }

    fn signal(&self, signal: Signal) {
        // It fails where nobody is left.
        let _ = kill_process_group(self.id, signal);
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        if !self.is_over {
            self.signal(Signal::KILL);
        }
    }
}
