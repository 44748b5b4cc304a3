//! Connecting to the database as libpq does: which servers to try, in which order, with which password, and
//! whether a server is suitable.
//!
//! `parameters` parses the parameters; `server` translates them for one server. The driver connects to one server with one
//! password; several servers, and passwords that change, are handled here. `relay` does what the driver cannot.

mod parameters;
mod passfile;
mod relay;
mod server;

use crate::Error;
use crate::error::is_login_rejected;
use futures_util::FutureExt;
use parameters::{Environment, Parameters, Problem, environment, home};
use server::{Encryption, Server};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{ConnectOptions, PgConnection, PgPool, Row};
use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use tokio_util::task::AbortOnDropHandle;
use tracing::{debug, warn};

/// How long connecting to a server may take, unless `connect_timeout` is set. If there are several servers
/// each gets less time, so that a dead one does not delay the next.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
const CONNECT_TIMEOUT_OF_SEVERAL: Duration = Duration::from_secs(5);

/// How long getting a password may take. Most programs that query a vault or a cloud are faster.
const PASSWORD_TIMEOUT: Duration = Duration::from_secs(20);

/// How often a changing password is refreshed for the handlers' pool, which opens connections at any time.
const PASSWORD_INTERVAL: Duration = Duration::from_secs(30);

/// How often a silent listening connection is probed, and how long it may take to answer.
const PROBE_INTERVAL: Duration = Duration::from_secs(20);
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);

const SESSION_ATTRIBUTES: &str = include_str!("../../../sql/queries/session_attributes.sql");

type PasswordFuture = Pin<Box<dyn Future<Output = Result<String, Box<dyn StdError + Send + Sync>>> + Send>>;
pub(crate) type PasswordFunction = Arc<dyn Fn() -> PasswordFuture + Send + Sync>;

/// How to connect to a database: one or several servers, described by a libpq connection string, `PG…`
/// variables or a service file.
///
/// ```
/// use graphile_worker::DatabaseConfig;
///
/// let config = DatabaseConfig::parse("postgres://me@db1.example.com,db2.example.com/my_app?target_session_attrs=read-write")?;
/// let config = config.password_provider(|| async { std::fs::read_to_string("/run/secrets/database-token") });
/// # Ok::<(), graphile_worker::Error>(())
/// ```
#[derive(Clone)]
pub struct DatabaseConfig {
    /// For the worker's own connections: with their name and settings.
    servers: Vec<Server>,
    /// As configured.
    plain: Arc<[Server]>,
    attributes: Attributes,
    is_random: bool,
    connect_timeout: Duration,
    answer_timeout: Option<Duration>,
    probe: Probe,
    password: Option<PasswordFunction>,
    passfile: Option<PathBuf>,
    current: Arc<Current>,
}

/// The result of the last connection, for the pool and for programs that connect by themselves.
#[derive(Default)]
struct Current {
    found: Mutex<Option<Found>>,
    /// Incremented whenever the URL changes.
    version: AtomicU64,
    pool: OnceLock<PgPool>,
    /// Whether connections are direct, without a pooler in between.
    is_direct: AtomicBool,
    /// When connections last went to another server than before.
    moved_at: MovedAt,
}

/// Shared with the pool's options, which must not keep the pool alive.
#[derive(Clone, Default)]
pub(crate) struct MovedAt(Arc<Mutex<Option<Instant>>>);

impl MovedAt {
    /// Whether a connection of this age goes to the previous server.
    pub(crate) fn is_outdated(&self, age: Duration) -> bool {
        let moved_at = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        moved_at.is_some_and(|moved_at| moved_at.elapsed() < age)
    }
}

#[derive(Clone, PartialEq, Eq)]
struct Found {
    server: usize,
    encryption: Encryption,
    password: Option<String>,
}

/// How a listening connection is probed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Probe {
    /// How long it may be silent.
    pub(crate) interval: Duration,
    /// How long the answer may take.
    pub(crate) timeout: Duration,
}

/// Which servers are suitable: `target_session_attrs`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Attributes {
    Any,
    ReadWrite,
    ReadOnly,
    Primary,
    Standby,
    PreferStandby,
}

/// Prints no secrets.
impl fmt::Debug for DatabaseConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DatabaseConfig").field("server", &self.server()).finish_non_exhaustive()
    }
}

impl DatabaseConfig {
    /// Parses a connection string: a URL, `name=value` pairs, the name of a database, or an empty string.
    /// Missing parameters come from the service file and the `PG…` variables, as in libpq. Unknown or
    /// unsupported parameters are errors.
    pub fn parse(text: &str) -> Result<DatabaseConfig, Error> {
        DatabaseConfig::read(text, &environment).map_err(|problem| Error::InvalidConnection { problem })
    }

    /// The database of the environment, if `PGDATABASE` or `PGSERVICE` is set.
    pub fn from_env() -> Option<Result<DatabaseConfig, Error>> {
        let is_set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        ["PGDATABASE", "PGSERVICE"].into_iter().any(is_set).then(|| DatabaseConfig::parse(""))
    }

    /// Whether a connection string contains a password, so that it should not be shown.
    pub fn has_password(text: &str) -> bool {
        let secrets = ["password", "sslpassword", "oauth_client_secret", "scram_client_key"];
        // A string that cannot be parsed may contain anything.
        Parameters::of_string(text).map_or(true, |read| secrets.iter().any(|name| read.get(name).is_some()))
    }

    fn read(text: &str, environment: Environment<'_>) -> Result<DatabaseConfig, Problem> {
        let parameters = Parameters::read(text, environment)?;
        let servers = Server::all(&parameters, environment)?;
        let attributes = [
            ("any", Attributes::Any),
            ("read-write", Attributes::ReadWrite),
            ("read-only", Attributes::ReadOnly),
            ("primary", Attributes::Primary),
            ("standby", Attributes::Standby),
            ("prefer-standby", Attributes::PreferStandby),
        ];
        let chosen = parameters.choice("target_session_attrs", &attributes.map(|(name, _)| name))?;
        let passfile = match parameters.get("passfile") {
            Some(file) => Some(file.into()),
            None => home(environment).map(|home| home.join(".pgpass")),
        };
        let usual = if servers.len() > 1 { CONNECT_TIMEOUT_OF_SEVERAL } else { CONNECT_TIMEOUT };
        let connect_timeout = match parameters.number("connect_timeout")? {
            // libpq waits for ever, or as long as the operating system does.
            None | Some(..=0) => usual,
            // As in libpq: many logins take longer than a second.
            Some(seconds) => Duration::from_secs(seconds.max(2).unsigned_abs()),
        };
        let answer_timeout = match parameters.number("tcp_user_timeout")? {
            None | Some(..=0) => None,
            Some(milliseconds) => Some(Duration::from_millis(milliseconds.unsigned_abs())),
        };
        Ok(DatabaseConfig {
            plain: servers.clone().into(),
            attributes: attributes
                .iter()
                .find(|(name, _)| *name == chosen)
                .map_or(Attributes::Any, |(_, found)| *found),
            is_random: parameters.choice("load_balance_hosts", &["disable", "random"])? == "random",
            connect_timeout,
            answer_timeout,
            probe: Probe::new(&parameters)?,
            password: None,
            passfile: passfile.filter(|_| servers.iter().any(|server| !server.has_password())),
            current: Arc::default(),
            servers,
        })
    }

    /// Calls this function for the password of each new connection. For rotated passwords and expiring
    /// tokens.
    #[must_use]
    pub fn password_provider<F, Fut, E>(mut self, provider: F) -> DatabaseConfig
    where
        F: Fn() -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<String, E>> + Send + 'static,
        E: Into<Box<dyn StdError + Send + Sync>>,
    {
        self.password = Some(password_function(provider));
        self
    }

    pub(crate) fn with_password_function(mut self, function: Option<PasswordFunction>) -> DatabaseConfig {
        self.password = function.or(self.password);
        self
    }

    /// Host and port of all servers, for messages.
    pub fn server(&self) -> String {
        self.servers.iter().map(Server::place).collect::<Vec<_>>().join(", ")
    }

    /// Sets the application name in `pg_stat_activity`. A worker appends its id to the name of its own
    /// connections.
    #[must_use]
    pub fn named(mut self, name: &str) -> DatabaseConfig {
        let mut plain = self.plain.to_vec();
        for server in &mut plain {
            server.options = server.options.clone().application_name(name);
        }
        self.plain = plain.into();
        self.application_name(name)
    }

    /// Sets the name of the worker's own connections.
    pub(crate) fn application_name(self, name: &str) -> DatabaseConfig {
        self.with(|options| options.application_name(name))
    }

    /// Changes the options of new connections.
    pub(crate) fn with(mut self, change: impl Fn(PgConnectOptions) -> PgConnectOptions) -> DatabaseConfig {
        for server in &mut self.servers {
            server.options = change(server.options.clone());
        }
        self
    }

    /// Adds settings of the session.
    pub(crate) fn options<'a>(self, settings: impl IntoIterator<Item = (&'a str, &'a str)> + Clone) -> DatabaseConfig {
        self.with(|options| options.options(settings.clone()))
    }

    /// How long the server may take to answer, if the connection string sets `tcp_user_timeout`.
    pub(crate) fn answer_timeout(&self) -> Option<Duration> {
        self.answer_timeout
    }

    pub(crate) fn probe(&self) -> Probe {
        self.probe
    }

    /// How long [`connect`](DatabaseConfig::connect) takes at most.
    pub(crate) fn time_to_connect(&self) -> Duration {
        let passes = if self.attributes == Attributes::PreferStandby { 2 } else { 1 };
        let for_password = if self.password.is_some() { PASSWORD_TIMEOUT } else { Duration::ZERO };
        for_password + self.connect_timeout * u32::try_from(self.servers.len() * passes).unwrap_or(u32::MAX)
    }

    /// How long [`current_options`](DatabaseConfig::current_options) takes at most, after a connection was opened.
    pub(crate) fn time_to_find_server(&self) -> Duration {
        let is_known = self.servers.len() == 1 && self.attributes == Attributes::Any && self.password.is_none();
        if is_known { Duration::ZERO } else { self.time_to_connect() }
    }

    /// Connects to the first suitable server.
    pub async fn connect(&self) -> Result<PgConnection, Error> {
        self.connection()
            .await
            .map_err(|source| Error::Database { context: format!("connect to {}", self.server()), source })
    }

    /// The same for callers that add their own context to the error.
    pub(crate) async fn connection(&self) -> sqlx::Result<PgConnection> {
        let (connection, found) = self.connect_to_some_server().await?;
        self.found(found);
        Ok(connection)
    }

    /// The options of a suitable server with the current password, for connections that the driver opens by
    /// itself.
    pub(crate) async fn current_options(&self) -> sqlx::Result<PgConnectOptions> {
        let known = self.known().filter(|_| self.servers.len() == 1 && self.attributes == Attributes::Any);
        let found = match known {
            // Only the password can have changed.
            Some(found) => Found { password: self.password_for(&self.servers[0]).await?, ..found },
            None => {
                let (connection, found) = self.connect_to_some_server().await?;
                let _ = sqlx::Connection::close(connection).await;
                found
            }
        };
        self.found(found.clone());
        let server = &self.servers[found.server];
        let options = with_password(server.options.clone(), found.password.as_deref());
        Ok(server.reached(options, found.encryption)?)
    }

    fn known(&self) -> Option<Found> {
        self.current.found.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether new connections may need another server or another password than the last one.
    pub(crate) fn may_change(&self) -> bool {
        self.servers.len() > 1
            || self.password.is_some()
            || self.passfile.is_some()
            || self.servers[0].ssl_modes.len() > 1
    }

    /// Whether the password may change.
    fn password_may_change(&self) -> bool {
        self.password.is_some() || self.passfile.is_some()
    }

    /// Options for a pool that connects when it is first used. If servers or passwords may change, the
    /// options are current only after a connection was opened, and as long as
    /// [`keep_password_current`](DatabaseConfig::keep_password_current) runs.
    pub(crate) fn pool_options(&self) -> PgConnectOptions {
        let found = self.known();
        let server = found.as_ref().map_or(0, |found| found.server);
        let password = match &found {
            Some(found) => found.password.clone(),
            None => self.password_of_file(&self.plain[server]),
        };
        let server = &self.plain[server];
        let options = with_password(server.options.clone(), password.as_deref());
        let is_direct = self.current.is_direct.load(Ordering::Acquire);
        let options = if is_direct { server.with_keepalives(options) } else { options };
        let encryption = found.map_or(server.ssl_modes[0], |found| found.encryption);
        server.reached(options.clone(), encryption).unwrap_or_else(|error| {
            warn!(label = "worker", server = server.place(), %error, "the pool cannot connect");
            // Never with weaker encryption than the parameters require.
            options.socket("/nonexistent")
        })
    }

    /// Creates a pool to the first suitable server, and keeps its password current until it is closed.
    pub async fn pool(&self, options: PgPoolOptions) -> Result<PgPool, Error> {
        // The pool retries if a server rejects it; a plain connection fails at once, with the reason.
        let connection = self.connect().await?;
        let pool = options.connect_lazy_with(self.pool_options());
        let _ = sqlx::Connection::close(connection).await;
        self.update_pool(&pool);
        if let Some(keeping) = self.keep_password_current() {
            let closed = pool.close_event();
            tokio::spawn(async move {
                closed.await;
                drop(keeping);
            });
        }
        Ok(pool)
    }

    /// Sets the pool whose new connections follow the worker's.
    pub(crate) fn update_pool(&self, pool: &PgPool) {
        let _ = self.current.pool.set(pool.clone());
    }

    /// Makes the server close new connections whose client is silent. Only for direct connections.
    pub(crate) fn with_keepalives(mut self) -> DatabaseConfig {
        for server in &mut self.servers {
            server.options = server.with_keepalives(server.options.clone());
        }
        self
    }

    /// The same for the handlers' pool.
    pub(crate) fn is_direct(&self) {
        self.current.is_direct.store(true, Ordering::Release);
        if let Some(pool) = self.current.pool.get() {
            pool.set_connect_options(self.pool_options());
        }
    }

    pub(crate) fn moved_at(&self) -> MovedAt {
        self.current.moved_at.clone()
    }

    /// Whether this session still has the requested attributes: a primary may have become read-only.
    pub(crate) async fn check(&self, session: &mut PgConnection) -> sqlx::Result<()> {
        match self.attributes {
            Attributes::PreferStandby => Ok(()),
            attributes => check_attributes(session, attributes).await,
        }
    }

    /// A URL for programs that connect by themselves.
    pub fn url(&self) -> String {
        match self.known() {
            Some(found) => self.plain[found.server].url(found.password.as_deref()),
            None => self.plain[0].url(self.password_of_file(&self.plain[0]).as_deref()),
        }
    }

    /// A number that changes whenever the URL changes.
    pub fn url_version(&self) -> u64 {
        self.current.version.load(Ordering::Acquire)
    }

    /// Until the handle is dropped, the password of the pool and of the URL is refreshed every 30 seconds.
    pub(crate) fn keep_password_current(&self) -> Option<AbortOnDropHandle<()>> {
        if !self.password_may_change() {
            return None;
        }
        let config = self.clone();
        Some(AbortOnDropHandle::new(tokio::spawn(async move {
            loop {
                tokio::time::sleep(PASSWORD_INTERVAL).await;
                config.refresh_password().await;
            }
        })))
    }

    async fn refresh_password(&self) {
        let Some(mut found) = self.known() else { return };
        match self.password_for(&self.plain[found.server]).await {
            Ok(password) => {
                found.password = password;
                self.found(found);
            }
            Err(error) => {
                debug!(label = "worker", %error, "could not refresh the password; the next connection retries")
            }
        }
    }

    /// Records the result, and updates the URL and the pool.
    fn found(&self, found: Found) {
        let before = self.url();
        {
            let mut current = self.current.found.lock().unwrap_or_else(PoisonError::into_inner);
            if current.as_ref() == Some(&found) {
                return;
            }
            if current.as_ref().is_some_and(|before| before.server != found.server) {
                *self.current.moved_at.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
            }
            *current = Some(found);
        }
        if self.url() != before {
            self.current.version.fetch_add(1, Ordering::Release);
        }
        if let Some(pool) = self.current.pool.get().filter(|_| self.may_change()) {
            pool.set_connect_options(self.pool_options());
        }
    }

    async fn connect_to_some_server(&self) -> sqlx::Result<(PgConnection, Found)> {
        let mut order: Vec<usize> = (0..self.servers.len()).collect();
        if self.is_random {
            shuffle(&mut order);
        }
        let passes: &[Attributes] = match self.attributes {
            Attributes::PreferStandby => &[Attributes::Standby, Attributes::Any],
            ref attributes => std::slice::from_ref(attributes),
        };
        let provided = self.provided_password().await?;
        let mut failures = Vec::new();
        for attributes in passes {
            for index in &order {
                let connecting = self.connect_to(*index, *attributes, provided.clone());
                let connected = tokio::time::timeout(self.connect_timeout, connecting).await;
                match connected.unwrap_or_else(|_| Err(no_answer(self.connect_timeout))) {
                    Ok(connected) => return Ok(connected),
                    Err(error) => failures.push((*index, error)),
                }
            }
        }
        Err(self.one_error(failures))
    }

    async fn connect_to(
        &self,
        index: usize,
        attributes: Attributes,
        provided: Option<String>,
    ) -> sqlx::Result<(PgConnection, Found)> {
        let server = &self.servers[index];
        let password = provided.or_else(|| self.password_of_file(server));
        check_files(server)?;
        let options = with_password(server.options.clone(), password.as_deref());
        let mut modes = server.ssl_modes.iter();
        loop {
            let Some(encryption) = modes.next() else { return Err(no_answer(self.connect_timeout)) };
            let is_last = modes.len() == 0;
            match server.reached(options.clone(), *encryption)?.connect().await.map_err(relay::original) {
                Ok(mut connection) => {
                    check_attributes(&mut connection, attributes).await?;
                    return Ok((connection, Found { server: index, encryption: *encryption, password }));
                }
                Err(error) if !is_last && is_about_encryption(&error) => {
                    debug!(label = "worker", server = server.place(), %error, "retrying with the other encryption mode");
                }
                Err(error) => return Err(explained(error, server)),
            }
        }
    }

    /// The password for a new connection; `None` if the options contain it.
    async fn password_for(&self, server: &Server) -> sqlx::Result<Option<String>> {
        Ok(self.provided_password().await?.or_else(|| self.password_of_file(server)))
    }

    async fn provided_password(&self) -> sqlx::Result<Option<String>> {
        let Some(provider) = &self.password else { return Ok(None) };
        let providing = AssertUnwindSafe(async { provider().await }).catch_unwind();
        let problem = match tokio::time::timeout(PASSWORD_TIMEOUT, providing).await {
            // The output of a program, and the content of a file, usually ends with a line break.
            Ok(Ok(Ok(password))) => return Ok(Some(password.trim_end_matches(['\n', '\r']).to_owned())),
            Ok(Ok(Err(error))) => error.to_string(),
            Ok(Err(_)) => "the password provider panicked".to_owned(),
            Err(_) => format!("the password provider took longer than {} seconds", PASSWORD_TIMEOUT.as_secs()),
        };
        Err(sqlx::Error::Io(io::Error::other(format!("could not get the password: {problem}"))))
    }

    fn password_of_file(&self, server: &Server) -> Option<String> {
        let passfile = self.passfile.as_ref().filter(|_| !server.has_password())?;
        server.password_of(passfile)
    }

    /// With one server, its own error; with several, the message of each. The result is not retryable only if
    /// all servers rejected the login.
    fn one_error(&self, mut failures: Vec<(usize, sqlx::Error)>) -> sqlx::Error {
        let all_rejected = failures.iter().all(|(_, error)| is_login_rejected(error));
        if failures.len() == 1 || all_rejected {
            return failures.pop().map_or_else(|| no_answer(self.connect_timeout), |(_, error)| error);
        }
        let messages = failures.iter().map(|(index, error)| format!("{}: {error}", self.servers[*index].place()));
        let messages = messages.collect::<Vec<_>>().join("; ");
        sqlx::Error::Io(io::Error::new(io::ErrorKind::NotConnected, messages))
    }
}

/// The server of these driver options, such as those of a pool.
impl From<PgConnectOptions> for DatabaseConfig {
    fn from(options: PgConnectOptions) -> DatabaseConfig {
        let servers = vec![Server::from_options(options)];
        DatabaseConfig {
            plain: servers.clone().into(),
            servers,
            attributes: Attributes::Any,
            is_random: false,
            connect_timeout: CONNECT_TIMEOUT,
            answer_timeout: None,
            probe: Probe { interval: PROBE_INTERVAL, timeout: PROBE_TIMEOUT },
            password: None,
            passfile: None,
            current: Arc::default(),
        }
    }
}

impl Probe {
    /// Probes a connection that only listens at the times of the keepalive parameters: a pooler in between would answer
    /// keepalives itself.
    fn new(parameters: &Parameters) -> Result<Probe, Problem> {
        let seconds = |name: &str| -> Result<Option<u32>, Problem> {
            let number = parameters.number(name)?.filter(|number| *number > 0);
            Ok(number.map(|number| u32::try_from(number).unwrap_or(u32::MAX)))
        };
        let (idle, interval, count) =
            (seconds("keepalives_idle")?, seconds("keepalives_interval")?, seconds("keepalives_count")?);
        let mut probe = Probe { interval: PROBE_INTERVAL, timeout: PROBE_TIMEOUT };
        // Without keepalives, libpq ignores the other parameters.
        if parameters.choice("keepalives", &["1", "0"])? == "0" {
            return Ok(probe);
        }
        if let Some(idle) = idle {
            probe.interval = Duration::from_secs(idle.into());
        }
        if let Some(interval) = interval {
            probe.timeout = Duration::from_secs(u64::from(interval) * u64::from(count.unwrap_or(1)));
        }
        Ok(probe)
    }
}

pub(crate) fn password_function<F, Fut, E>(provider: F) -> PasswordFunction
where
    F: Fn() -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<String, E>> + Send + 'static,
    E: Into<Box<dyn StdError + Send + Sync>>,
{
    Arc::new(move || {
        let password = provider();
        Box::pin(async move { password.await.map_err(Into::into) })
    })
}

/// Fails if the session does not have the requested attributes.
async fn check_attributes(connection: &mut PgConnection, wanted: Attributes) -> sqlx::Result<()> {
    if wanted == Attributes::Any {
        return Ok(());
    }
    // Not as a prepared statement, which a pooler may not support.
    let row = sqlx::raw_sql(SESSION_ATTRIBUTES).fetch_one(connection).await?;
    let (is_standby, is_read_only): (bool, bool) = (row.try_get("is_standby")?, row.try_get("is_read_only")?);
    let problem = match wanted {
        Attributes::ReadWrite if is_read_only => "the session is read-only, but target_session_attrs is read-write",
        Attributes::ReadOnly if !is_read_only => "the session is not read-only, but target_session_attrs is read-only",
        Attributes::Primary if is_standby => "the server is a standby, but target_session_attrs is primary",
        Attributes::Standby if !is_standby => "the server is not a standby, but target_session_attrs is standby",
        _ => return Ok(()),
    };
    Err(sqlx::Error::Io(io::Error::new(io::ErrorKind::NotConnected, problem)))
}

fn check_files(server: &Server) -> sqlx::Result<()> {
    for (name, file) in server.files() {
        if let Err(error) = std::fs::File::open(&file) {
            let problem = format!("{name} is {file:?}, which cannot be read: {error}");
            return Err(sqlx::Error::Io(io::Error::new(io::ErrorKind::InvalidInput, problem)));
        }
    }
    Ok(())
}

fn no_answer(after: Duration) -> sqlx::Error {
    let problem = format!("no answer within {} seconds", after.as_secs());
    sqlx::Error::Io(io::Error::new(io::ErrorKind::TimedOut, problem))
}

fn with_password(options: PgConnectOptions, password: Option<&str>) -> PgConnectOptions {
    match password {
        Some(password) => options.password(password),
        None => options,
    }
}

/// Whether the same server may accept a connection with (or without) encryption instead.
fn is_about_encryption(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Tls(_) => true,
        // An untrusted certificate.
        sqlx::Error::Io(error) => error.kind() == io::ErrorKind::InvalidData,
        // pg_hba.conf has no entry for this kind of connection.
        sqlx::Error::Database(error) => error.code().is_some_and(|code| code == "28000"),
        _ => false,
    }
}

/// Adds advice to an error about a certificate. The driver only says what is wrong.
fn explained(error: sqlx::Error, server: &Server) -> sqlx::Error {
    let text = error.to_string();
    let host = server.options.get_host();
    let advice = if text.contains("UnsupportedCertVersion") {
        "the server's certificate is an X.509 version 1 certificate, which the driver rejects: issue a version 3 certificate with the host name in subjectAltName (openssl x509 -req … -extfile FILE)".to_owned()
    } else if text.contains("CaUsedAsEndEntity") {
        "the server's certificate is a self-signed CA certificate (CA:TRUE), which the driver rejects for a server: create a CA, sign the server's certificate with it (CA:FALSE), and set sslrootcert to the CA's certificate".to_owned()
    } else if text.contains("UnknownIssuer") {
        let of = if server.has_roots() { "in sslrootcert" } else { "of the system" };
        format!(
            "no authority {of} has signed the certificate of the server: name the certificate of the one that did in sslrootcert. A self-signed certificate cannot be verified: make an authority and have it sign the server's certificate"
        )
    } else if text.contains("not valid for name") || text.contains("NotValidForName") {
        format!(
            "connect with a host name from the certificate's subjectAltName (the CN is ignored), or issue a certificate for {host:?}"
        )
    } else if text.contains("certificate expired") || text.contains("Expired") {
        "the server's certificate has expired: renew it, and check this machine's clock".to_owned()
    } else if text.contains("server does not support TLS") {
        "turn TLS on at the server (ssl = on), or use sslmode=prefer or disable on a trusted network".to_owned()
    } else {
        return error;
    };
    match error {
        sqlx::Error::Io(error) => sqlx::Error::Io(io::Error::new(error.kind(), format!("{error}: {advice}"))),
        sqlx::Error::Tls(error) => sqlx::Error::Tls(format!("{error}: {advice}").into()),
        other => other,
    }
}

/// Shuffles the order.
fn shuffle(order: &mut [usize]) {
    use std::hash::{BuildHasher, RandomState};
    let state = RandomState::new();
    order.sort_by_cached_key(|index| state.hash_one(index));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<DatabaseConfig, Problem> {
        DatabaseConfig::read(text, &|_| None)
    }

    #[test]
    fn timeouts_come_from_the_string_or_depend_on_the_number_of_servers() {
        let timeouts = |text: &str| {
            let config = read(text).expect(text);
            (config.time_to_connect().as_secs(), config.answer_timeout(), config.probe())
        };
        let probe = Probe { interval: PROBE_INTERVAL, timeout: PROBE_TIMEOUT };
        assert_eq!(timeouts("host=a"), (15, None, probe));
        assert_eq!(timeouts("host=a,b,c"), (15, None, probe));
        assert_eq!(timeouts("host=a,b target_session_attrs=prefer-standby connect_timeout=3"), (12, None, probe));
        let keepalives =
            "host=a connect_timeout=1 tcp_user_timeout=2500 keepalives_idle=7 keepalives_interval=2 keepalives_count=3";
        let changed = Probe { interval: Duration::from_secs(7), timeout: Duration::from_secs(6) };
        assert_eq!(timeouts(keepalives), (2, Some(Duration::from_millis(2500)), changed));
        assert_eq!(timeouts("host=a keepalives=0 keepalives_idle=7").2, probe);
    }

    #[test]
    fn variables_count_as_the_parameters_do() {
        let with = |text: &str, name: &str, value: &str| {
            DatabaseConfig::read(text, &|asked| (asked == name).then(|| value.to_owned()))
        };
        let seconds =
            |text: &str, value: &str| with(text, "PGCONNECT_TIMEOUT", value).map(|c| c.time_to_connect().as_secs());
        assert_eq!(seconds("host=a", "7"), Ok(7));
        assert_eq!(seconds("host=a", "1"), Ok(2), "as in libpq");
        assert_eq!(seconds("host=a connect_timeout=4", "7"), Ok(4));
        let problem = "PGCONNECT_TIMEOUT is \"soon\", expected a whole number";
        assert_eq!(seconds("host=a", "soon"), Err(problem.to_owned()));
        let negotiated = |text: &str, value: &str| with(text, "PGSSLNEGOTIATION", value).err();
        assert_eq!(negotiated("host=a", "postgres"), None);
        let problem = negotiated("host=a", "direct").unwrap_or_default();
        assert!(problem.starts_with("PGSSLNEGOTIATION is \"direct\", which is not supported: "), "{problem}");
        assert_eq!(negotiated("host=a sslnegotiation=postgres", "direct"), None, "the string wins");
    }

    #[test]
    fn an_unknown_value_is_rejected_with_the_choices() {
        for (text, message) in [
            (
                "target_session_attrs=master",
                "target_session_attrs is \"master\", expected one of any, read-write, read-only, primary, standby, prefer-standby",
            ),
            ("load_balance_hosts=yes", "load_balance_hosts is \"yes\", expected one of disable, random"),
            ("connect_timeout=soon", "connect_timeout is \"soon\", expected a whole number"),
            ("keepalives=on", "keepalives is \"on\", expected one of 1, 0"),
        ] {
            assert_eq!(read(text).err().as_deref(), Some(message));
        }
    }

    #[test]
    fn a_password_is_found_in_every_kind_of_connection_string() {
        for (text, has) in [
            ("postgres://u:p@h/d", true),
            ("postgres://u@h:5432/d", false),
            ("postgres://h/d?user=u&password=p", true),
            ("host=h password = p", true),
            ("host=h user=password", false),
            ("my_db", false),
            ("http://u:p@h", true),
        ] {
            assert_eq!(DatabaseConfig::has_password(text), has, "{text}");
        }
    }
}
