//! The servers of a connection: translates the parameters of each into the driver's options, and into a URL
//! for programs that connect by themselves. `connect` chooses among the servers.

use super::parameters::{Environment, Parameters, Problem, home};
use super::relay::{self, Keepalive, Route, Trust};
use sqlx::ConnectOptions;
use sqlx::postgres::{PgConnectOptions, PgSslMode};
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// libpq's default.
const PORT: u16 = 5432;

/// Where PostgreSQL packages keep the socket.
const SOCKET_FOLDERS: [&str; 3] = ["/var/run/postgresql", "/private/tmp", "/tmp"];

/// A server to try.
#[derive(Clone)]
pub(crate) struct Server {
    /// Without a password that is only read when connecting.
    pub(crate) options: PgConnectOptions,
    /// Encryption modes to try in order. The next one is only tried if the server or its certificate does not
    /// allow the previous one.
    pub(crate) ssl_modes: Vec<Encryption>,
    /// `None` if the parameters do not set it.
    keepalive: Option<Keepalive>,
    target: Target,
}

/// One way to connect. These are the driver's modes, except for `allow`, which it does not implement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Encryption {
    No,
    /// If the server supports it.
    Preferred,
    Required,
    VerifyCa,
    VerifyFull,
}

impl Encryption {
    pub(crate) fn mode(self) -> PgSslMode {
        match self {
            Encryption::No => PgSslMode::Disable,
            Encryption::Preferred => PgSslMode::Prefer,
            Encryption::Required => PgSslMode::Require,
            Encryption::VerifyCa => PgSslMode::VerifyCa,
            Encryption::VerifyFull => PgSslMode::VerifyFull,
        }
    }
}

/// The same data in a readable form: the driver's options cannot be read back.
#[derive(Clone, Default)]
struct Target {
    /// A name, an address, or the folder of a socket.
    host: String,
    port: u16,
    user: String,
    password: Option<String>,
    database: Option<String>,
    ssl_mode: &'static str,
    /// The host under which the password file lists this server.
    passfile_host: String,
    root_cert: Option<String>,
    client_cert: Option<(String, String)>,
    options: Option<String>,
}

/// TLS settings, which are the same for all servers.
struct Tls {
    ssl_mode: &'static str,
    /// A file; `None` for the system's CAs.
    root_cert: Option<PathBuf>,
    client_cert: Option<(PathBuf, PathBuf)>,
}

impl Server {
    /// All servers of the parameters.
    pub(crate) fn all(parameters: &Parameters, environment: Environment<'_>) -> Result<Vec<Server>, Problem> {
        let tls = Tls::new(parameters, environment)?;
        let places = places(parameters)?;
        let user = match parameters.get("user") {
            Some(user) => user.to_owned(),
            None => whoami::username().map_err(|_| "no user is given, and the current user has no name: set `user`")?,
        };
        places.into_iter().map(|place| Server::new(place, &user, parameters, &tls)).collect()
    }

    fn new(place: Place, user: &str, parameters: &Parameters, tls: &Tls) -> Result<Server, Problem> {
        let Place { host, name, port } = place;
        let mut options = base(parameters)?.host(&host).port(port).username(user);
        if let Some(password) = parameters.get("password") {
            options = options.password(password);
        }
        let database = parameters.get("dbname");
        if let Some(database) = database {
            options = options.database(database);
        }
        let name_of_application = parameters.get("application_name").or(parameters.get("fallback_application_name"));
        if let Some(name) = name_of_application {
            options = options.application_name(name);
        }
        let is_socket = host.starts_with('/');
        if name.is_some() && tls.ssl_mode == "verify-full" {
            return Err("hostaddr cannot be combined with host and sslmode=verify-full, because the driver would verify the certificate against the address: remove hostaddr".to_owned());
        }
        if let Some(root) = &tls.root_cert {
            options = options.ssl_root_cert(root);
        }
        if let Some((cert, key)) = &tls.client_cert {
            options = options.ssl_client_cert(cert).ssl_client_key(key);
        }
        // As in libpq: a socket is not encrypted, and given root certificates are used in every mode.
        let encrypted = if tls.root_cert.is_some() { Encryption::VerifyCa } else { Encryption::Required };
        let ssl_modes = match tls.ssl_mode {
            _ if is_socket => vec![Encryption::No],
            "disable" => vec![Encryption::No],
            "allow" => vec![Encryption::No, encrypted],
            "prefer" if tls.root_cert.is_none() => vec![Encryption::Preferred, Encryption::No],
            "prefer" => vec![encrypted, Encryption::No],
            "require" => vec![encrypted],
            "verify-ca" => vec![Encryption::VerifyCa],
            _ => vec![Encryption::VerifyFull],
        };
        let target = Target {
            passfile_host: name
                .unwrap_or_else(|| if is_default_socket(&host) { "localhost".to_owned() } else { host.clone() }),
            host,
            port,
            user: user.to_owned(),
            password: parameters.get("password").map(str::to_owned),
            database: database.map(str::to_owned),
            ssl_mode: match tls.ssl_mode {
                _ if is_socket => "disable",
                // Other drivers may treat `require` as a mode that does not verify.
                "require" if tls.root_cert.is_some() => "verify-ca",
                mode => mode,
            },
            root_cert: tls.root_cert.as_ref().map(|file| file.display().to_string()),
            client_cert: tls
                .client_cert
                .as_ref()
                .map(|(cert, key)| (cert.display().to_string(), key.display().to_string())),
            options: options.get_options().map(str::to_owned),
        };
        let keepalive = Keepalive::of(parameters)?;
        Ok(Server { options: options.ssl_mode(ssl_modes[0].mode()), ssl_modes, keepalive, target })
    }

    /// The server that the driver's options name.
    pub(crate) fn from_options(options: PgConnectOptions) -> Server {
        let hidden = Hidden::of(&options);
        let has_roots = hidden.root_cert.is_some() && options.get_socket().is_none();
        let (ssl_mode, ssl_modes) = match options.get_ssl_mode() {
            // The driver treats both the same.
            PgSslMode::Disable | PgSslMode::Allow => ("disable", vec![Encryption::No]),
            // As in libpq, given root certificates are used. The driver would ignore them.
            PgSslMode::Prefer if has_roots => ("prefer", vec![Encryption::VerifyCa, Encryption::No]),
            PgSslMode::Prefer => ("prefer", vec![Encryption::Preferred]),
            PgSslMode::Require if has_roots => ("verify-ca", vec![Encryption::VerifyCa]),
            PgSslMode::Require => ("require", vec![Encryption::Required]),
            PgSslMode::VerifyCa => ("verify-ca", vec![Encryption::VerifyCa]),
            PgSslMode::VerifyFull => ("verify-full", vec![Encryption::VerifyFull]),
        };
        // The driver does not accept an IPv6 address in brackets.
        let host = options.get_host();
        let address = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).map(str::to_owned);
        let options = match &address {
            Some(address) => options.host(address),
            None => options,
        };
        let host = match options.get_socket() {
            Some(socket) => socket.display().to_string(),
            None => options.get_host().to_owned(),
        };
        let target = Target {
            passfile_host: String::new(),
            host,
            port: options.get_port(),
            user: options.get_username().to_owned(),
            password: hidden.password,
            database: options.get_database().map(str::to_owned),
            ssl_mode,
            root_cert: hidden.root_cert,
            client_cert: hidden.client_cert.zip(hidden.client_key),
            options: options.get_options().map(str::to_owned),
        };
        Server { options: without_float_digits(options), ssl_modes, keepalive: None, target }
    }

    /// The options of this server for a connection of this kind. They lead to the relay if the driver does not support what the
    /// parameters require.
    pub(crate) fn reached(&self, options: PgConnectOptions, encryption: Encryption) -> io::Result<PgConnectOptions> {
        let Target { host, port, root_cert, client_cert, .. } = &self.target;
        let root_cert =
            root_cert.clone().filter(|_| matches!(encryption, Encryption::VerifyCa | Encryption::VerifyFull));
        let is_socket = host.starts_with('/');
        if is_socket || (root_cert.is_none() && self.keepalive.is_none()) {
            return Ok(options.ssl_mode(encryption.mode()));
        }
        let trust = root_cert.map(|root_cert| Trust {
            root_cert,
            checks_name: encryption == Encryption::VerifyFull,
            client_cert: client_cert.clone(),
        });
        let mode = if trust.is_some() { PgSslMode::Disable } else { encryption.mode() };
        let keepalive = self.keepalive.unwrap_or_default();
        let folder = relay::folder(&Route { host: host.clone(), port: *port, trust, keepalive })?;
        Ok(options.socket(folder).ssl_mode(mode))
    }

    /// Adds settings that make the server close a connection whose client is silent, because it may hold locks. Not for a
    /// pooler, which rejects them. Settings from the parameters stay.
    pub(crate) fn with_keepalives(&self, options: PgConnectOptions) -> PgConnectOptions {
        let keepalive = self.keepalive.unwrap_or_default();
        let given = options.get_options().unwrap_or_default().to_owned();
        let settings = [
            ("tcp_keepalives_idle", keepalive.idle.as_secs()),
            ("tcp_keepalives_interval", keepalive.interval.as_secs()),
            ("tcp_keepalives_count", keepalive.count.into()),
        ];
        if !keepalive.is_on {
            return options;
        }
        options.options(settings.into_iter().filter(|(name, _)| !given.contains(name)))
    }

    /// The server for messages, without secrets.
    pub(crate) fn place(&self) -> String {
        let Target { host, port, .. } = &self.target;
        if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
    }

    /// Whether certificates are verified by a file.
    pub(crate) fn has_roots(&self) -> bool {
        self.target.root_cert.is_some()
    }

    pub(crate) fn has_password(&self) -> bool {
        self.target.password.is_some()
    }

    /// The password for this server in the password file.
    pub(crate) fn password_of(&self, passfile: &Path) -> Option<String> {
        let Target { passfile_host, port, user, database, .. } = &self.target;
        super::passfile::password(passfile, passfile_host, *port, database.as_deref().unwrap_or(user), user)
    }

    /// The files that the driver will read.
    pub(crate) fn files(&self) -> Vec<(&'static str, PathBuf)> {
        if self.ssl_modes == [Encryption::No] {
            return Vec::new();
        }
        let Target { root_cert, client_cert, .. } = &self.target;
        let client = client_cert.iter().flat_map(|(cert, key)| [("sslcert", cert), ("sslkey", key)]);
        let files = root_cert.iter().map(|root| ("sslrootcert", root)).chain(client);
        files.filter(|(_, file)| !file.contains("-----BEGIN")).map(|(name, file)| (name, file.into())).collect()
    }

    /// A URL with the same meaning for libpq and for the drivers of other languages.
    pub(crate) fn url(&self, password: Option<&str>) -> String {
        let target = &self.target;
        let mut url = format!("postgres://{}", encoded(&target.user));
        if let Some(password) = password.or(target.password.as_deref()) {
            url = format!("{url}:{}", encoded(password));
        }
        let host = &target.host;
        let host = if host.contains(':') && !host.starts_with('/') { format!("[{host}]") } else { encoded(host) };
        url = format!("{url}@{host}:{}/{}", target.port, target.database.as_deref().map(encoded).unwrap_or_default());
        let (cert, key) = target.client_cert.clone().unzip();
        let ssl_mode = match (target.ssl_mode, host.starts_with("%2F")) {
            // libpq's default. Node's `pg` would verify the certificate.
            ("prefer", _) | (_, true) => None,
            (mode, _) => Some(mode.to_owned()),
        };
        let pairs = [
            ("sslmode", ssl_mode),
            ("sslrootcert", target.root_cert.clone()),
            ("sslcert", cert),
            ("sslkey", key),
            ("options", target.options.clone()),
        ];
        let mut mark = '?';
        for (name, value) in pairs {
            if let Some(value) = value {
                url = format!("{url}{mark}{name}={}", encoded(&value));
                mark = '&';
            }
        }
        url
    }
}

/// Values that the driver's options only reveal in a URL. Taken from a copy with a simple host, user and
/// database: with some values, the driver panics.
#[derive(Default)]
struct Hidden {
    password: Option<String>,
    root_cert: Option<String>,
    client_cert: Option<String>,
    client_key: Option<String>,
}

impl Hidden {
    fn of(options: &PgConnectOptions) -> Hidden {
        let mut hidden = Hidden::default();
        let url = options.clone().host("host").username("user").database("database").to_url_lossy();
        hidden.password = url.password().and_then(decoded);
        for (name, value) in url.query_pairs() {
            let value = Some(value.strip_prefix("file: ").unwrap_or(&value).to_owned());
            match &*name {
                "sslrootcert" => hidden.root_cert = value,
                "sslcert" => hidden.client_cert = value,
                "sslkey" => hidden.client_key = value,
                _ => {}
            }
        }
        hidden
    }
}

fn decoded(text: &str) -> Option<String> {
    let parameters = Parameters::of_string(&format!("postgres://:{text}@/")).ok()?;
    parameters.get("password").map(str::to_owned)
}

/// Percent-encodes everything except letters, digits and `-._~`.
fn encoded(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    let encode = |byte: u8| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
    text.bytes().map(encode).collect()
}

/// Options that have no method in the driver.
fn base(parameters: &Parameters) -> Result<PgConnectOptions, Problem> {
    let mut options = PgConnectOptions::new_without_pgpass();
    // The driver itself has read the environment.
    if let Some(text) = parameters.get("options").filter(|_| !parameters.is_from_environment("options")) {
        let url = format!("postgres://localhost/?options={}", encoded(text));
        options = url.parse().map_err(|_| "options cannot be parsed".to_owned())?;
    }
    if !parameters.settings.is_empty() {
        options = options.options(parameters.settings.iter().map(|(name, value)| (name, value)));
    }
    if let Some(capacity) = parameters.number("statement-cache-capacity")? {
        let wrong = || format!("statement-cache-capacity is {capacity}, expected at least 0");
        options = options.statement_cache_capacity(usize::try_from(capacity).map_err(|_| wrong())?);
    }
    Ok(without_float_digits(options))
}

/// PostgreSQL 12 and later print floats in full without it, and PgBouncer rejects it.
fn without_float_digits(options: PgConnectOptions) -> PgConnectOptions {
    options.extra_float_digits(None)
}

impl Keepalive {
    /// `None` if the parameters do not set any.
    fn of(parameters: &Parameters) -> Result<Option<Keepalive>, Problem> {
        let above_zero = |name: &str| -> Result<Option<u32>, Problem> {
            let number = parameters.number(name)?.filter(|number| *number > 0);
            Ok(number.map(|number| u32::try_from(number).unwrap_or(u32::MAX)))
        };
        let seconds = |number: u32| Duration::from_secs(number.into());
        let (idle, interval, count) =
            (above_zero("keepalives_idle")?, above_zero("keepalives_interval")?, above_zero("keepalives_count")?);
        let user_timeout = above_zero("tcp_user_timeout")?;
        // Without keepalives, libpq ignores the other numbers, but not `tcp_user_timeout`.
        let is_on = parameters.choice("keepalives", &["1", "0"])? == "1";
        let is_given = user_timeout.is_some() || (is_on && (idle.is_some() || interval.is_some() || count.is_some()));
        let usual = Keepalive::default();
        let given = Keepalive {
            is_on,
            idle: idle.map_or(usual.idle, seconds),
            interval: interval.map_or(usual.interval, seconds),
            count: count.unwrap_or(usual.count),
            user_timeout: user_timeout.map(|number| Duration::from_millis(number.into())),
        };
        Ok(is_given.then_some(given))
    }
}

/// Where a server is.
struct Place {
    /// What the driver connects to: a name, an address, or the folder of a socket.
    host: String,
    /// The host name, if `host` is an address from `hostaddr`.
    name: Option<String>,
    port: u16,
}

fn places(parameters: &Parameters) -> Result<Vec<Place>, Problem> {
    let list = |name: &str| parameters.get(name).map(|text| text.split(',').map(str::trim).collect::<Vec<_>>());
    let (hosts, addresses) = (list("host"), list("hostaddr"));
    let ports = list("port").unwrap_or_default();
    if let (Some(hosts), Some(addresses)) = (&hosts, &addresses)
        && hosts.len() != addresses.len()
    {
        return Err(format!(
            "{} hosts but {} values of hostaddr: expected the same number",
            hosts.len(),
            addresses.len()
        ));
    }
    let count = hosts.as_ref().or(addresses.as_ref()).map_or(1, Vec::len);
    if ports.len() > 1 && ports.len() != count {
        return Err(format!("{} ports for {count} hosts: expected one port, or one per host", ports.len()));
    }
    let port =
        |index: usize| -> Result<u16, Problem> {
            match ports.get(index).or(ports.first().filter(|_| ports.len() == 1)) {
                None | Some(&"") => Ok(PORT),
                Some(text) => text.parse().ok().filter(|port| *port > 0).ok_or_else(|| {
                    format!("{} is {text:?}, expected a number from 1 to 65535", parameters.place("port"))
                }),
            }
        };
    let place = |index: usize| {
        let port = port(index)?;
        let at = |list: &Option<Vec<&str>>| {
            list.as_ref().map(|list| list[index]).filter(|text| !text.is_empty()).map(str::to_owned)
        };
        let (host, address) = (at(&hosts), at(&addresses));
        if let Some(address) = address {
            if address.parse::<IpAddr>().is_err() {
                return Err(format!(
                    "{} is {address:?}, expected an IP address (use `host` for names)",
                    parameters.place("hostaddr")
                ));
            }
            return Ok(Place { host: address, name: host, port });
        }
        let host = host.unwrap_or_else(|| default_host(port));
        // Brackets belong in URLs, but are common elsewhere, too.
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).map(str::to_owned).unwrap_or(host);
        if host.starts_with('@') {
            return Err(format!(
                "{} is {host:?}: abstract sockets are not supported, use a folder or a host",
                parameters.place("host")
            ));
        }
        Ok(Place { host, name: None, port })
    };
    (0..count).map(place).collect()
}

fn default_host(port: u16) -> String {
    let has_socket = |folder: &&str| Path::new(folder).join(format!(".s.PGSQL.{port}")).exists();
    SOCKET_FOLDERS.iter().find(|folder| has_socket(folder)).map_or("localhost", |folder| folder).to_owned()
}

fn is_default_socket(host: &str) -> bool {
    SOCKET_FOLDERS.contains(&host)
}

impl Tls {
    fn new(parameters: &Parameters, environment: Environment<'_>) -> Result<Tls, Problem> {
        let modes = ["prefer", "disable", "allow", "require", "verify-ca", "verify-full", "no-verify"];
        let given = parameters.choice("sslmode", &modes).map_err(|problem| problem.replace(", no-verify", ""))?;
        let usual = |name: &str| Some(home(environment)?.join(".postgresql").join(name)).filter(|file| file.exists());
        let root = parameters.get("sslrootcert");
        let (ssl_mode, root_cert) = match (given, root) {
            // The spelling of Node's `pg`.
            ("no-verify", _) => ("require", None),
            ("disable", _) => ("disable", None),
            (mode, Some("system")) => {
                if mode != "verify-full" && parameters.get("sslmode").is_some() {
                    return Err(format!(
                        "sslmode is {mode:?}, but sslrootcert=system requires sslmode=verify-full: anyone can get a certificate from a public CA"
                    ));
                }
                ("verify-full", None)
            }
            (mode, Some(file)) => (mode, Some(existing(parameters, "sslrootcert", file)?)),
            (mode, None) => (mode, usual("root.crt")),
        };
        if ssl_mode == "verify-ca" && root_cert.is_none() {
            return Err("sslmode=verify-ca requires sslrootcert=FILE with the CA's certificate; or use sslmode=verify-full with the system's CAs".to_owned());
        }
        let client_cert = match parameters.get("sslcert") {
            _ if ssl_mode == "disable" => None,
            Some(file) => Some(existing(parameters, "sslcert", file)?),
            None => usual("postgresql.crt"),
        };
        let client_cert = match (client_cert, parameters.get("sslkey")) {
            (None, _) => None,
            (Some(cert), Some(key)) => Some((cert, existing(parameters, "sslkey", key)?)),
            (Some(cert), None) => {
                let key = usual("postgresql.key")
                    .ok_or_else(|| format!("the client certificate {} has no key: set sslkey", cert.display()))?;
                Some((cert, key))
            }
        };
        Ok(Tls { ssl_mode, root_cert, client_cert })
    }
}

fn existing(parameters: &Parameters, name: &str, file: &str) -> Result<PathBuf, Problem> {
    match std::fs::File::open(file) {
        Ok(_) => Ok(file.into()),
        Err(error) => Err(format!("{} is {file:?}, which cannot be read: {error}", parameters.place(name))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nothing(_: &str) -> Option<String> {
        None
    }

    fn servers(text: &str) -> Result<Vec<Server>, Problem> {
        Server::all(&Parameters::read(text, &nothing)?, &nothing)
    }

    fn server(text: &str) -> Server {
        servers(text).unwrap_or_else(|problem| panic!("{text}: {problem}")).remove(0)
    }

    #[test]
    fn hosts_and_ports_are_paired() {
        let places = |text: &str| servers(text).map(|all| all.iter().map(Server::place).collect::<Vec<_>>());
        assert_eq!(places("postgres://a:1,b,[::1]:3/d").unwrap(), ["a:1", "b:5432", "[::1]:3"]);
        assert_eq!(places("host=a,b port=6543").unwrap(), ["a:6543", "b:6543"]);
        assert_eq!(places("host=::1").unwrap(), ["[::1]:5432"]);
        assert_eq!(places("host=[::1] port=7").unwrap(), ["[::1]:7"]);
        assert_eq!(places("host=name hostaddr=10.0.0.1").unwrap(), ["10.0.0.1:5432"]);
        for (text, message) in [
            ("host=a,b,c port=1,2", "2 ports for 3 hosts"),
            ("host=a,b hostaddr=10.0.0.1", "2 hosts but 1 values of hostaddr"),
            ("host=a port=70000", "port is \"70000\", expected a number from 1 to 65535"),
            ("hostaddr=localhost", "hostaddr is \"localhost\", expected an IP address"),
            ("host=@abstract", "host is \"@abstract\": abstract sockets are not supported"),
            ("host=a hostaddr=10.0.0.1 sslmode=verify-full", "hostaddr cannot be combined with host"),
        ] {
            let problem = servers(text).err().expect(text);
            assert!(problem.starts_with(message), "{problem}");
        }
    }

    #[test]
    fn an_encryption_mode_is_never_weaker_than_in_libpq() {
        let root = std::env::temp_dir().join(format!("gw-root-{}.crt", std::process::id()));
        std::fs::write(&root, "").unwrap();
        let root = root.display();
        for (text, modes) in [
            ("host=a".to_owned(), &[Encryption::Preferred, Encryption::No][..]),
            ("host=a sslmode=require".to_owned(), &[Encryption::Required]),
            (format!("host=a sslmode=require sslrootcert={root}"), &[Encryption::VerifyCa]),
            (format!("host=a sslrootcert={root}"), &[Encryption::VerifyCa, Encryption::No]),
            ("host=a sslmode=allow".to_owned(), &[Encryption::No, Encryption::Required]),
            ("host=a sslmode=disable sslrootcert=/nonexistent".to_owned(), &[Encryption::No]),
            ("host=a sslmode=verify-full".to_owned(), &[Encryption::VerifyFull]),
            ("host=a sslrootcert=system".to_owned(), &[Encryption::VerifyFull]),
            ("host=/tmp sslmode=verify-full".to_owned(), &[Encryption::No]),
            ("postgres://a/d?sslmode=no-verify".to_owned(), &[Encryption::Required]),
        ] {
            assert_eq!(server(&text).ssl_modes, modes, "{text}");
        }
        for (text, message) in [
            (
                "sslmode=verify_full",
                "sslmode is \"verify_full\", expected one of prefer, disable, allow, require, verify-ca, verify-full",
            ),
            (
                "sslmode=require sslrootcert=/nonexistent/root.crt",
                "sslrootcert is \"/nonexistent/root.crt\", which cannot be read: No such file",
            ),
            ("sslcert=/nonexistent/me.crt", "sslcert is \"/nonexistent/me.crt\", which cannot be read"),
            ("sslmode=verify-ca", "sslmode=verify-ca requires sslrootcert=FILE"),
            (
                "sslmode=require sslrootcert=system",
                "sslmode is \"require\", but sslrootcert=system requires sslmode=verify-full",
            ),
        ] {
            let problem = servers(text).err().expect(text);
            assert!(problem.starts_with(message), "{problem}");
        }
        let _ = std::fs::remove_file(root.to_string());
    }

    #[test]
    fn the_url_for_other_programs_has_the_same_meaning() {
        for (text, url) in [
            (
                "user='a b@' password='p:/?#%' host=::1 dbname='d/é' options='-c geqo=off'",
                "postgres://a%20b%40:p%3A%2F%3F%23%25@[::1]:5432/d%2F%C3%A9?options=-c%20geqo%3Doff",
            ),
            (
                "user=u host=/var/run/postgresql port=6543 dbname=d sslmode=require",
                "postgres://u@%2Fvar%2Frun%2Fpostgresql:6543/d",
            ),
            ("user=u host=a dbname=d sslmode=verify-full", "postgres://u@a:5432/d?sslmode=verify-full"),
        ] {
            assert_eq!(server(text).url(None), url);
            assert_eq!(server(url).url(None), url, "parsing it again gives the same URL");
        }
    }

    #[test]
    fn every_pool_can_be_turned_into_a_url() {
        let options = PgConnectOptions::new_without_pgpass()
            .host("::1")
            .port(6543)
            .username("a@b/c")
            .password("p %@:")
            .database("d ?#")
            .ssl_mode(PgSslMode::VerifyCa)
            .ssl_root_cert("/certs/my root.crt");
        let url = "postgres://a%40b%2Fc:p%20%25%40%3A@[::1]:6543/d%20%3F%23?sslmode=verify-ca&sslrootcert=%2Fcerts%2Fmy%20root.crt";
        assert_eq!(Server::from_options(options.clone()).url(None), url);
        let bracketed = Server::from_options(options.host("[::1]"));
        assert_eq!((bracketed.url(None).as_str(), bracketed.options.get_host()), (url, "::1"));
    }
}
