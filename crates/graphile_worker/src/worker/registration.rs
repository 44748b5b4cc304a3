//! Running a worker under an id: `run` and `run_once` start the scheduler and the file watcher, register the worker,
//! start its heartbeat and listener, and run the loop. If the worker was declared dead while it was only slow, they
//! register it again under a new id.
//!
//! Not here: `run_loop` exchanges and runs jobs; `heartbeat` sends heartbeats; `recovery` declares workers dead.

use super::Worker;
use super::exchange::Exchange;
use super::heartbeat::Heartbeat;
use super::listener::Listener;
use super::run_loop::{Mode, RunLoop};
use super::settings::new_worker_id;
use super::startup::Startup;
use crate::Error;
use crate::cron::file::log_unknown_tasks;
use crate::cron::{CronSettings, CronTask};
use crate::hooks::WorkerStart;
use crate::recovery::heartbeat::StartLease;
use std::collections::BTreeSet;
use std::sync::{Arc, PoisonError};
use std::time::Duration;
use tokio::sync::Mutex;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

/// How long a worker that was declared dead waits before it tries again to register.
const REREGISTER_PAUSE: Duration = Duration::from_secs(1);

/// Why a run under one id has ended.
enum Ended {
    Stopped,
    DeclaredDead,
}

impl Worker {
    /// Runs jobs until the worker is asked to stop, then lets running jobs finish and returns once every outcome is
    /// recorded.
    ///
    /// Also returns if a newer release changes the schema in a way that this release cannot work with;
    /// [`exit_reason`](Worker::exit_reason) then says so.
    pub async fn run(&self) -> Result<(), Error> {
        self.run_in(Mode::Continuous).await
    }

    /// Runs jobs until no job is due, then returns. Does not add recurring jobs.
    pub async fn run_once(&self) -> Result<(), Error> {
        self.run_in(Mode::Drain).await
    }

    async fn run_in(&self, mode: Mode) -> Result<(), Error> {
        let custom = self.settings.shutdown_signal.as_ref().map(|signal| signal());
        let _signals = self.shutdown.watch(self.settings.listen_os_shutdown_signals, custom);
        let is_continuous = mode == Mode::Continuous;
        let has_cron = self.settings.crontab_may_change || !self.crontabs.borrow().is_empty();
        let cron = (is_continuous && has_cron).then(|| self.start_cron());
        let _watchers = is_continuous.then(|| self.start_watchers());
        let ended = self.run_and_reregister(mode).await;
        if let Some(external) = &self.external {
            external.source.stop().await;
        }
        if let Some(cron) = cron {
            cron.stop(&self.shutdown).await;
        }
        ended
    }

    fn start_cron(&self) -> CronTask {
        let settings = CronSettings {
            session: self.settings.session.clone(),
            clock: self.settings.cron_clock.clone(),
            answer_timeout: self.settings.answer_timeout,
        };
        CronTask::start(settings, self.crontabs.subscribe(), self.shared.clone(), &self.shutdown)
    }

    /// Watches the source of tasks and the crontab's file, until the set is dropped.
    fn start_watchers(&self) -> JoinSet<()> {
        let mut watchers = JoinSet::new();
        if let Some(external) = self.external.clone() {
            let tasks = self.tasks.clone();
            watchers.spawn(async move { external.watch(&tasks).await });
        }
        if let Some(crontab) = self.watched_crontab.clone() {
            let crontabs = self.crontabs.clone();
            watchers.spawn(async move { crontab.lock().await.watch(&crontabs).await });
        }
        if !watchers.is_empty() {
            watchers.spawn(log_unknown_tasks(self.tasks.subscribe(), self.crontabs.subscribe()));
        }
        watchers
    }

    /// Runs under one id after another, as long as each is declared dead although the worker was only slow.
    async fn run_and_reregister(&self, mode: Mode) -> Result<(), Error> {
        let mut reregistered: Option<Worker> = None;
        loop {
            let current = reregistered.as_ref().unwrap_or(self);
            match current.run_registered(mode).await {
                Ok(Ended::Stopped) => return Ok(()),
                Ok(Ended::DeclaredDead) => reregistered = Some(current.with_new_id()),
                // The worker was just disconnected, so new connections may fail too.
                Err(error)
                    if reregistered.is_some() && error.is_retryable() && !self.shutdown.leaving.is_cancelled() =>
                {
                    warn!(
                        label = "worker",
                        error = &error as &dyn std::error::Error,
                        "could not register again yet; retrying"
                    );
                    let _ = tokio::time::timeout(REREGISTER_PAUSE, self.shutdown.leaving.cancelled()).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// One run under one id, from the hook `WorkerStart` to the hook `WorkerStop`, however it ends.
    async fn run_registered(&self, mode: Mode) -> Result<Ended, Error> {
        let (settings, shared) = (&self.settings, &self.shared);
        let mut startup = Startup::new(settings.startup_timeout);
        let _keep_passwords_current = settings.session.config().keep_password_current();
        shared.hooks.emit(WorkerStart, || shared.event(None)).await;
        let heartbeat = tokio::select! {
            heartbeat = self.register(&mut startup) => match heartbeat {
                Ok(heartbeat) => heartbeat,
                Err(error) => return self.failed_to_start(error).await.map(|()| Ended::Stopped),
            },
            () = self.shutdown.leaving.cancelled() => return self.stopped_while_starting().await.map(|()| Ended::Stopped),
        };
        let declared_dead = heartbeat.as_ref().map(|heartbeat| heartbeat.declared_dead.clone()).unwrap_or_default();
        let listener = match settings.listen.clone().filter(|_| mode == Mode::Continuous) {
            Some(on) => Listener::start(on, shared.clone()),
            None => Listener::poll_only(shared),
        };
        if mode == Mode::Continuous {
            info!(
                label = "worker",
                worker_id = self.worker_id(),
                tasks = ?self.tasks.borrow().keys().collect::<BTreeSet<_>>(),
                "connected and waiting for jobs"
            );
        }
        let start_lease = heartbeat.as_ref().map(Heartbeat::start_lease).unwrap_or_default();
        let ended = self.run_loop(listener, mode, declared_dead.clone(), start_lease, startup).await;
        // A report without an answer may still be executed. Keep the registration, so that no worker recovers these
        // jobs yet.
        let not_recorded = matches!(ended, Err(Error::OutcomesNotWritten { .. }));
        if let Some(heartbeat) = heartbeat
            && !not_recorded
        {
            heartbeat.end().await;
        }
        if declared_dead.is_cancelled() && !self.shutdown.leaving.is_cancelled() && (ended.is_ok() || not_recorded) {
            return Ok(Ended::DeclaredDead);
        }
        ended.map(|()| Ended::Stopped)
    }

    /// Registers the worker, if recovery is on. Waits for the database if it is not ready.
    async fn register(&self, startup: &mut Startup) -> Result<Option<Heartbeat>, Error> {
        if !self.settings.recovery.enabled {
            return Ok(None);
        }
        loop {
            match Heartbeat::start(&self.settings, self.shared.clone(), self.tasks.subscribe()).await {
                Ok(heartbeat) => return Ok(Some(heartbeat)),
                Err(error) => startup.wait_after(error).await?,
            }
        }
    }

    async fn run_loop(
        &self,
        listener: Listener,
        mode: Mode,
        declared_dead: CancellationToken,
        start_lease: Arc<StartLease>,
        startup: Startup,
    ) -> Result<(), Error> {
        let exchange = tokio::select! {
            exchange = self.open_exchange(startup) => match exchange {
                Ok(exchange) => exchange,
                Err(error) => return self.failed_to_start(error).await,
            },
            () = self.shutdown.leaving.cancelled() => return self.stopped_while_starting().await,
        };
        RunLoop::new(self, exchange, listener, mode, declared_dead, start_lease).run().await
    }

    /// Opens the first lane. Waits for the database if it is not ready.
    async fn open_exchange(&self, mut startup: Startup) -> Result<Exchange, Error> {
        loop {
            let opened = Exchange::open(
                self.connection.lock().await.take(),
                &self.settings.session,
                self.shared.statements.clone(),
                self.shared.clone(),
                self.tasks.borrow().keys().cloned().collect(),
                self.settings.answer_timeout,
            );
            let started = async {
                let exchange = opened.await?;
                self.set_limits().await?;
                Ok(exchange)
            };
            match started.await {
                Ok(exchange) => {
                    startup.succeeded();
                    return Ok(exchange);
                }
                Err(error) => startup.wait_after(error).await?,
            }
        }
    }

    /// Sets the limits of the options, once: a worker that registers again, or runs again, does not replace limits that were set
    /// in the meantime.
    async fn set_limits(&self) -> Result<(), Error> {
        let limits = self.settings.limits.lock().unwrap_or_else(PoisonError::into_inner).clone();
        self.shared.utils.set_limits_of_worker(&limits).await?;
        self.settings.limits.lock().unwrap_or_else(PoisonError::into_inner).clear();
        Ok(())
    }

    fn with_new_id(&self) -> Worker {
        let worker_id = new_worker_id(&self.settings.recovery);
        info!(label = "worker", before = self.worker_id(), worker_id, "declared dead: continuing under a new id");
        Worker {
            settings: self.settings.clone(),
            tasks: self.tasks.clone(),
            crontabs: self.crontabs.clone(),
            watched_crontab: self.watched_crontab.clone(),
            external: self.external.clone(),
            shared: Arc::new(self.shared.with_worker_id(worker_id.into())),
            shutdown: self.shutdown.clone(),
            exit_reason: self.exit_reason.clone(),
            connection: Mutex::default(),
        }
    }
}
