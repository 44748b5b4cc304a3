//! Parses connection parameters as libpq does: from a connection string, a service file and the `PG…`
//! variables. An unsupported parameter is an error that names it, because ignoring one may connect to another
//! server or without encryption. Values that may be secret are never printed.
//!
//! `server` and `connect` decide what the parameters mean for a connection.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

/// Where PostgreSQL packages keep the system's service file, unless `PGSYSCONFDIR` is set.
const SYSTEM_SERVICE_FILES: [&str; 2] = ["/etc/postgresql-common/pg_service.conf", "/etc/pg_service.conf"];

/// What is wrong with a connection string, a variable or a service file, and what to do.
pub(crate) type Problem = String;

/// How this release supports a parameter.
enum Support {
    /// `connect` or `server` uses it.
    Used,
    /// Any value is accepted and has no effect on a worker.
    NoEffect,
    /// These values are what the driver does anyway. Any other value is an error, with this advice.
    Only(&'static [&'static str], &'static str),
    /// The driver does not support it: an error, with this advice.
    Unsupported(&'static str),
}

use Support::{NoEffect, Only, Unsupported, Used};

const NO_BINDING: &str = "the driver does not support channel binding: remove it and use sslmode=verify-full, which also detects a man in the middle";
const NO_CRL: &str = "the driver does not check revocation lists: remove it";
const NO_DIRECT: &str = "the driver asks the server before it starts TLS: use sslnegotiation=postgres";
const NO_OAUTH: &str = "the driver does not support OAuth: use a password, or a client certificate";
const NO_SCRAM_KEYS: &str = "the driver does not support SCRAM keys: use a password";
const NO_KEY_PASSWORD: &str = "the driver cannot decrypt a client key: decrypt it (openssl pkey -in KEY -out NEW_KEY), protect the new file with file permissions, and set sslkey to it";

/// Every parameter of libpq 18, and the variable that sets it.
const PARAMETERS: &[(&str, Option<&str>, Support)] = &[
    ("host", Some("PGHOST"), Used),
    ("hostaddr", Some("PGHOSTADDR"), Used),
    ("port", Some("PGPORT"), Used),
    ("dbname", Some("PGDATABASE"), Used),
    ("user", Some("PGUSER"), Used),
    ("password", Some("PGPASSWORD"), Used),
    ("passfile", Some("PGPASSFILE"), Used),
    ("service", Some("PGSERVICE"), Used),
    ("servicefile", Some("PGSERVICEFILE"), Used),
    ("application_name", Some("PGAPPNAME"), Used),
    ("fallback_application_name", None, Used),
    ("options", Some("PGOPTIONS"), Used),
    ("connect_timeout", Some("PGCONNECT_TIMEOUT"), Used),
    ("target_session_attrs", Some("PGTARGETSESSIONATTRS"), Used),
    ("load_balance_hosts", Some("PGLOADBALANCEHOSTS"), Used),
    ("keepalives", None, Used),
    ("keepalives_idle", None, Used),
    ("keepalives_interval", None, Used),
    ("keepalives_count", None, Used),
    ("tcp_user_timeout", None, Used),
    ("sslmode", Some("PGSSLMODE"), Used),
    ("sslrootcert", Some("PGSSLROOTCERT"), Used),
    ("sslcert", Some("PGSSLCERT"), Used),
    ("sslkey", Some("PGSSLKEY"), Used),
    ("sslpassword", None, Unsupported(NO_KEY_PASSWORD)),
    (
        "sslcertmode",
        Some("PGSSLCERTMODE"),
        Only(
            &["allow"],
            "the driver sends a client certificate if sslcert is set and the server asks for one: remove it",
        ),
    ),
    ("sslcrl", Some("PGSSLCRL"), Unsupported(NO_CRL)),
    ("sslcrldir", Some("PGSSLCRLDIR"), Unsupported(NO_CRL)),
    ("sslsni", Some("PGSSLSNI"), Only(&["1"], "the driver always sends the host name to the server: remove it")),
    ("sslnegotiation", Some("PGSSLNEGOTIATION"), Only(&["postgres"], NO_DIRECT)),
    ("sslkeylogfile", None, Unsupported("the driver does not write TLS keys to a file: remove it")),
    ("sslcompression", Some("PGSSLCOMPRESSION"), NoEffect),
    (
        "ssl_min_protocol_version",
        Some("PGSSLMINPROTOCOLVERSION"),
        Only(
            &["TLSv1", "TLSv1.1", "TLSv1.2"],
            "the driver accepts TLS 1.2 and 1.3: set ssl_min_protocol_version on the server",
        ),
    ),
    (
        "ssl_max_protocol_version",
        Some("PGSSLMAXPROTOCOLVERSION"),
        Only(&["TLSv1.3"], "the driver accepts TLS 1.2 and 1.3: set ssl_max_protocol_version on the server"),
    ),
    ("channel_binding", Some("PGCHANNELBINDING"), Only(&["prefer", "disable"], NO_BINDING)),
    (
        "require_auth",
        Some("PGREQUIREAUTH"),
        Unsupported(
            "the driver uses the authentication method that the server asks for: remove it and use sslmode=verify-full",
        ),
    ),
    (
        "requirepeer",
        Some("PGREQUIREPEER"),
        Unsupported("the driver does not check who owns a socket: remove it and protect the socket's folder"),
    ),
    (
        "gssencmode",
        Some("PGGSSENCMODE"),
        Only(&["prefer", "disable"], "the driver does not support GSSAPI: use sslmode=verify-full"),
    ),
    ("krbsrvname", Some("PGKRBSRVNAME"), NoEffect),
    ("gsslib", Some("PGGSSLIB"), NoEffect),
    ("gssdelegation", Some("PGGSSDELEGATION"), NoEffect),
    (
        "min_protocol_version",
        Some("PGMINPROTOCOLVERSION"),
        Only(&["3.0"], "the driver supports version 3.0 of the protocol: remove it"),
    ),
    ("max_protocol_version", Some("PGMAXPROTOCOLVERSION"), Only(&["3.0", "3.2", "latest"], "remove it")),
    ("replication", None, Only(&["false", "off", "no", "0"], "a worker needs an ordinary connection: remove it")),
    ("scram_client_key", None, Unsupported(NO_SCRAM_KEYS)),
    ("scram_server_key", None, Unsupported(NO_SCRAM_KEYS)),
    ("oauth_issuer", None, Unsupported(NO_OAUTH)),
    ("oauth_client_id", None, Unsupported(NO_OAUTH)),
    ("oauth_client_secret", None, Unsupported(NO_OAUTH)),
    ("oauth_scope", None, Unsupported(NO_OAUTH)),
    // The driver always uses UTF-8.
    ("client_encoding", Some("PGCLIENTENCODING"), NoEffect),
    ("authtype", None, NoEffect),
    ("tty", None, NoEffect),
    // A parameter of sqlx, whose URLs applications may share with us.
    ("statement-cache-capacity", None, Used),
];

/// Names of parameters in other drivers.
const ALIASES: &[(&str, &str)] = &[
    ("ssl-mode", "sslmode"),
    ("ssl-root-cert", "sslrootcert"),
    ("ssl-ca", "sslrootcert"),
    ("ssl-cert", "sslcert"),
    ("ssl-key", "sslkey"),
];

/// Parameters that other programs put into a URL: Prisma, Rails and Node's `pg`. They affect neither the
/// server nor the encryption and are ignored, so that a shared URL works here.
const IGNORED_PARAMETERS: &[&str] = &[
    "schema",
    "connection_limit",
    "pool_timeout",
    "socket_timeout",
    "pgbouncer",
    "statement_cache_size",
    "pool",
    "uselibpqcompat",
];

/// Where a value comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Origin {
    ConnectionString,
    Service(String),
    Variable(&'static str),
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Value {
    text: String,
    origin: Origin,
}

/// The parameters that are set. An empty value in a connection string overrides the variable, and means the
/// default.
#[derive(Clone, Default)]
pub(crate) struct Parameters {
    values: BTreeMap<&'static str, Value>,
    /// `options[name]=value` in URLs of sqlx.
    pub(crate) settings: Vec<(String, String)>,
}

/// Prints no values, because some are secret.
impl fmt::Debug for Parameters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.values.keys()).finish()
    }
}

/// The environment, or a test's replacement.
pub(crate) type Environment<'a> = &'a dyn Fn(&str) -> Option<String>;

/// The environment of this process.
pub(crate) fn environment(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

impl Parameters {
    /// Reads the parameters of a connection string (a URL, `name=value` pairs, or the bare name of a
    /// database), then those of its service, then those of the environment.
    pub(crate) fn read(text: &str, environment: Environment<'_>) -> Result<Parameters, Problem> {
        let mut parameters = Parameters::of_string(text)?;
        let of_environment = |name: &str| environment(name).filter(|value| !value.is_empty());
        parameters.add_service(&of_environment)?;
        for (name, variable, _) in PARAMETERS {
            if let Some(variable) = variable
                && let Some(text) = of_environment(variable)
            {
                parameters.values.entry(name).or_insert(Value { text, origin: Origin::Variable(variable) });
            }
        }
        parameters.check_support()?;
        Ok(parameters)
    }

    /// Reads only the parameters of the connection string.
    pub(crate) fn of_string(text: &str) -> Result<Parameters, Problem> {
        let mut parameters = Parameters::default();
        if let Some(rest) = text.strip_prefix("postgres://").or_else(|| text.strip_prefix("postgresql://")) {
            parameters.read_url(rest)?;
        } else if text.contains('=') {
            parameters.read_pairs(text)?;
        } else if text.chars().all(|c| c.is_alphanumeric() || "_-.".contains(c)) {
            // As in Node and psql.
            if !text.is_empty() {
                parameters.set("dbname", text.to_owned(), &Origin::ConnectionString)?;
            }
        } else {
            return Err("expected a URL such as postgres://user:password@host:5432/database, or pairs such as \
                        `host=localhost dbname=my_app`"
                .to_owned());
        }
        Ok(parameters)
    }

    /// The value, if it is set and not empty.
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.values.get(name).map(|value| value.text.as_str()).filter(|text| !text.is_empty())
    }

    /// The name of the parameter in a message, by where it was set.
    pub(crate) fn place(&self, name: &str) -> String {
        match self.values.get(name).map(|value| &value.origin) {
            Some(Origin::Variable(variable)) => (*variable).to_owned(),
            Some(Origin::Service(service)) => format!("{name} of the service {service:?}"),
            Some(Origin::ConnectionString) | None => name.to_owned(),
        }
    }

    /// Whether the environment sets it, and neither the connection string nor a service does.
    pub(crate) fn is_from_environment(&self, name: &str) -> bool {
        matches!(self.values.get(name), Some(Value { origin: Origin::Variable(_), .. }))
    }

    /// One of these choices; the first one is the default.
    pub(crate) fn choice(&self, name: &str, choices: &[&'static str]) -> Result<&'static str, Problem> {
        let Some(text) = self.get(name) else { return Ok(choices[0]) };
        choices
            .iter()
            .find(|choice| **choice == text)
            .copied()
            .ok_or_else(|| format!("{} is {text:?}, expected one of {}", self.place(name), choices.join(", ")))
    }

    /// An integer.
    pub(crate) fn number(&self, name: &str) -> Result<Option<i64>, Problem> {
        let Some(text) = self.get(name) else { return Ok(None) };
        let number =
            text.trim().parse().map_err(|_| format!("{} is {text:?}, expected a whole number", self.place(name)));
        number.map(Some)
    }

    fn set(&mut self, name: &str, text: String, origin: &Origin) -> Result<(), Problem> {
        let name = ALIASES.iter().find(|(alias, _)| *alias == name).map_or(name, |(_, name)| name);
        let Some((name, _, _)) = PARAMETERS.iter().find(|(known, _, _)| *known == name) else {
            let of = match origin {
                Origin::Service(service) => format!(" of the service {service:?}"),
                _ => String::new(),
            };
            return Err(format!("unknown parameter {name:?}{of}: check its spelling, or remove it"));
        };
        if text.contains('\0') {
            return Err(format!("{name} contains a NUL character"));
        }
        self.values.insert(name, Value { text, origin: origin.clone() });
        Ok(())
    }

    fn check_support(&self) -> Result<(), Problem> {
        for (name, _, support) in PARAMETERS {
            let Some(text) = self.get(name) else { continue };
            match support {
                Only(values, advice) if !values.contains(&text) => {
                    return Err(format!("{} is {text:?}, which is not supported: {advice}", self.place(name)));
                }
                // Without the value: it may be secret.
                Unsupported(advice) => return Err(format!("{} is not supported: {advice}", self.place(name))),
                _ => {}
            }
        }
        Ok(())
    }

    /// Parses the part after `postgres://`.
    fn read_url(&mut self, rest: &str) -> Result<(), Problem> {
        let origin = Origin::ConnectionString;
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, database) = rest.split_once('/').unwrap_or((rest, ""));
        let (login, hosts) =
            authority.rsplit_once('@').map_or((None, authority), |(login, hosts)| (Some(login), hosts));
        if let Some(login) = login {
            let (user, password) = login.split_once(':').map_or((login, None), |(user, word)| (user, Some(word)));
            if !user.is_empty() {
                self.set("user", decoded("the user", user)?, &origin)?;
            }
            if let Some(password) = password.filter(|password| !password.is_empty()) {
                self.set("password", decoded("the password", password)?, &origin)?;
            }
        }
        if !hosts.is_empty() {
            let hosts = hosts.split(',').map(host_and_port).collect::<Result<Vec<_>, _>>()?;
            let (hosts, ports): (Vec<String>, Vec<&str>) = hosts.into_iter().unzip();
            if hosts.iter().any(|host| !host.is_empty()) {
                self.set("host", hosts.join(","), &origin)?;
            }
            if ports.iter().any(|port| !port.is_empty()) {
                self.set("port", ports.join(","), &origin)?;
            }
        }
        if !database.is_empty() {
            self.set("dbname", decoded("the database", database)?, &origin)?;
        }
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let name = decoded("the name of a parameter", name)?;
            let value = decoded(&name, value)?;
            self.set_in_url(&name, value)?;
        }
        Ok(())
    }

    fn set_in_url(&mut self, name: &str, value: String) -> Result<(), Problem> {
        let origin = Origin::ConnectionString;
        match (name, value.as_str()) {
            // The spelling of Node's drivers and of JDBC.
            ("ssl", "true" | "1") => self.set("sslmode", "require".to_owned(), &origin),
            ("ssl", "false" | "0") => self.set("sslmode", "disable".to_owned(), &origin),
            ("ssl", _) => Err(format!("ssl is {value:?}, expected true or false; sslmode=verify-full is better")),
            _ if IGNORED_PARAMETERS.contains(&name) => Ok(()),
            _ => match name.strip_prefix("options[").and_then(|rest| rest.strip_suffix(']')) {
                Some(setting) => {
                    self.settings.push((setting.to_owned(), value));
                    Ok(())
                }
                None => self.set(name, value, &origin),
            },
        }
    }

    /// Parses `name=value name='a value'`.
    fn read_pairs(&mut self, text: &str) -> Result<(), Problem> {
        let mut rest = text.trim_start();
        while !rest.is_empty() {
            let Some((name, after)) = rest.split_once('=') else {
                return Err(
                    "a parameter has no value: expected pairs such as `host=localhost dbname=my_app`".to_owned()
                );
            };
            let name = name.trim_end();
            if name.is_empty() || name.contains(char::is_whitespace) {
                // The part before the space may be the end of a password.
                return Err("values that contain spaces must be in single quotes: password='two words'".to_owned());
            }
            let (value, after) = pair_value(name, after.trim_start())?;
            self.set(name, value, &Origin::ConnectionString)?;
            rest = after.trim_start();
        }
        Ok(())
    }

    /// Adds the service's parameters that the connection string does not set.
    fn add_service(&mut self, of_environment: Environment<'_>) -> Result<(), Problem> {
        let Some(service) = self.get("service").map(str::to_owned).or_else(|| of_environment("PGSERVICE")) else {
            return Ok(());
        };
        let named = self.get("servicefile").map(str::to_owned).or_else(|| of_environment("PGSERVICEFILE"));
        let mut files: Vec<PathBuf> = Vec::new();
        match (named, home(of_environment)) {
            (Some(file), _) => files.push(file.into()),
            (None, Some(home)) => files.push(home.join(".pg_service.conf")),
            (None, None) => {}
        }
        match of_environment("PGSYSCONFDIR") {
            Some(folder) => files.push(Path::new(&folder).join("pg_service.conf")),
            None => files.extend(SYSTEM_SERVICE_FILES.map(PathBuf::from)),
        }
        let mut searched = Vec::new();
        for file in &files {
            let text = match std::fs::read_to_string(file) {
                Ok(text) => text,
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                    searched.push(format!("{} does not exist", file.display()));
                    continue;
                }
                Err(error) => return Err(format!("the service file {} cannot be read: {error}", file.display())),
            };
            if let Some(pairs) = section(&text, &service, file)? {
                let origin = Origin::Service(service.clone());
                let mut of_service = Parameters::default();
                for (name, value) in pairs {
                    of_service
                        .set(&name, value, &origin)
                        .map_err(|problem| format!("{}: {problem}", file.display()))?;
                }
                for (name, value) in of_service.values {
                    self.values.entry(name).or_insert(value);
                }
                return Ok(());
            }
            searched.push(format!("{} has no section [{service}]", file.display()));
        }
        Err(format!("service {service:?} is not defined: {}", searched.join("; ")))
    }
}

/// The lines of a section of a service file; `None` if the section does not exist.
fn section(text: &str, service: &str, file: &Path) -> Result<Option<Vec<(String, String)>>, Problem> {
    let mut found: Option<Vec<(String, String)>> = None;
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let place = format!("{} line {number}", file.display());
        if let Some(name) = line.strip_prefix('[') {
            if found.is_some() {
                break;
            }
            let name = name.strip_suffix(']').ok_or_else(|| format!("{place}: expected `]` at the end of the line"))?;
            found = (name == service).then(Vec::new);
        } else if let Some(pairs) = &mut found {
            if line.starts_with("ldap") {
                return Err(format!("{place}: LDAP services are not supported: write the parameters into the file"));
            }
            let (name, value) = line.split_once('=').ok_or_else(|| format!("{place}: expected name=value"))?;
            let name = name.trim();
            if name == "service" || name == "servicefile" {
                return Err(format!("{place}: a service cannot refer to another service"));
            }
            pairs.push((name.to_owned(), value.trim().to_owned()));
        }
    }
    Ok(found)
}

pub(crate) fn home(of_environment: Environment<'_>) -> Option<PathBuf> {
    of_environment("HOME").filter(|home| !home.is_empty()).map(PathBuf::from)
}

/// `host`, `host:5432`, `[::1]:5432` or `%2Fsocket%2Ffolder`.
fn host_and_port(text: &str) -> Result<(String, &str), Problem> {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, after) = rest.split_once(']').ok_or("missing `]` after an IPv6 address")?;
            match after.strip_prefix(':') {
                Some(port) => (host, port),
                None if after.is_empty() => (host, ""),
                None => return Err("expected `:` and a port after the `]` of an IPv6 address".to_owned()),
            }
        }
        None if text.matches(':').count() > 1 => {
            return Err("an IPv6 address in a URL must be in brackets: postgres://[::1]:5432/database".to_owned());
        }
        None => text.split_once(':').unwrap_or((text, "")),
    };
    Ok((decoded("the host", host)?, port))
}

/// Decodes percent-encoding. The text may be secret: the message does not contain it.
fn decoded(what: &str, text: &str) -> Result<String, Problem> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit = || rest.next().and_then(|digit| char::from(digit).to_digit(16));
        let (Some(high), Some(low)) = (digit(), digit()) else {
            return Err(format!(
                "{what} contains a `%` that is not followed by two hexadecimal digits: write `%25` for a percent sign, and percent-encode other special characters"
            ));
        };
        bytes.push((high * 16 + low) as u8);
    }
    String::from_utf8(bytes).map_err(|_| format!("{what} is not valid UTF-8 after percent-decoding"))
}

/// Parses a quoted value, or a value up to the next space, and returns the rest of the text. A backslash
/// escapes the next character.
fn pair_value<'a>(name: &str, text: &'a str) -> Result<(String, &'a str), Problem> {
    let (quoted, text) = text.strip_prefix('\'').map_or((false, text), |text| (true, text));
    let mut value = String::new();
    let mut characters = text.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '\\' => value.extend(characters.next().map(|(_, escaped)| escaped)),
            '\'' if quoted => return Ok((value, &text[at + 1..])),
            blank if !quoted && blank.is_whitespace() => return Ok((value, &text[at..])),
            other => value.push(other),
        }
    }
    if quoted { Err(format!("the value of {name} has no closing quote")) } else { Ok((value, "")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nothing(_: &str) -> Option<String> {
        None
    }

    fn all(text: &str) -> BTreeMap<&'static str, String> {
        let parameters = Parameters::read(text, &nothing).unwrap_or_else(|problem| panic!("{text}: {problem}"));
        parameters.values.into_iter().map(|(name, value)| (name, value.text)).collect()
    }

    #[track_caller]
    fn same(text: &str, expected: &[(&str, &str)]) {
        let expected: BTreeMap<&str, String> =
            expected.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
        assert_eq!(all(text), expected, "{text}");
    }

    #[test]
    fn urls_are_parsed_as_in_libpq() {
        same("postgres://", &[]);
        same("postgresql:///", &[]);
        same("postgres:///db", &[("dbname", "db")]);
        same("postgres://user@/db?host=/socket", &[("user", "user"), ("dbname", "db"), ("host", "/socket")]);
        same("postgres://%2Fvar%2Frun:6543/db", &[("host", "/var/run"), ("port", "6543"), ("dbname", "db")]);
        same("postgres://[::1]/db", &[("host", "::1"), ("dbname", "db")]);
        same("postgres://u@[2001:db8::7]:6543", &[("user", "u"), ("host", "2001:db8::7"), ("port", "6543")]);
        same("postgres://a:1,b,[::1]:3/db", &[("host", "a,b,::1"), ("port", "1,,3"), ("dbname", "db")]);
        same(
            "postgres://a,b/?target_session_attrs=read-write",
            &[("host", "a,b"), ("target_session_attrs", "read-write")],
        );
        same(
            "postgres://a%40b:p%3A%2F%3F%23%5B%25@h/d%2Fe%20f",
            &[("user", "a@b"), ("password", "p:/?#[%"), ("host", "h"), ("dbname", "d/e f")],
        );
        // An unescaped `@` in a password is common, and unambiguous.
        same("postgres://u:p@ss@h/d", &[("user", "u"), ("password", "p@ss"), ("host", "h"), ("dbname", "d")]);
        same("postgres://h/d?options=-c%20geqo%3Doff", &[("host", "h"), ("dbname", "d"), ("options", "-c geqo=off")]);
        same("postgres://h?ssl=true&schema=public&connection_limit=5", &[("host", "h"), ("sslmode", "require")]);
    }

    #[test]
    fn pairs_and_bare_names_are_parsed_as_in_libpq() {
        same("my_db", &[("dbname", "my_db")]);
        same("host=::1 port = 5433", &[("host", "::1"), ("port", "5433")]);
        same(
            r"user='o\'brien' password = 'a \\ b=c' dbname=d\ e",
            &[("user", "o'brien"), ("password", r"a \ b=c"), ("dbname", "d e")],
        );
        same("password=''", &[("password", "")]);
    }

    #[test]
    fn errors_never_contain_a_secret() {
        for (text, message) in [
            ("http://user:secret@host/db", "expected a URL"),
            ("user:secret@host", "expected a URL"),
            ("postgres://user:secret%@host/db", "the password contains a `%`"),
            ("postgres://user:secret@::1/db", "an IPv6 address in a URL must be in brackets"),
            ("postgres://user:secret@[::1/db", "missing `]` after an IPv6 address"),
            ("password=two secret words host=x", "values that contain spaces must be in single quotes"),
            ("password='secret", "the value of password has no closing quote"),
            ("postgres://h/d?sslpasword=secret", "unknown parameter \"sslpasword\""),
            ("postgres://h/d?sslpassword=secret", "sslpassword is not supported: the driver cannot decrypt"),
            (
                "postgres://h/d?channel_binding=require",
                "channel_binding is \"require\", which is not supported: the driver",
            ),
            ("postgres://h/d?sslnegotiation=direct", "sslnegotiation is \"direct\", which is not supported"),
            ("postgres://h/d?gssencmode=require", "gssencmode is \"require\""),
            ("postgres://h/d?oauth_scope=secret", "oauth_scope is not supported"),
            ("postgres://h/d?ssl_min_protocol_version=TLSv1.3", "ssl_min_protocol_version is \"TLSv1.3\""),
            ("postgres://h/d?password=a%00secret", "password contains a NUL"),
        ] {
            let problem = Parameters::read(text, &nothing).expect_err(text);
            assert!(problem.starts_with(message) && !problem.contains("secret"), "{text}: {problem}");
        }
    }

    #[test]
    fn the_connection_string_overrides_variables_and_errors_name_the_variable() {
        let environment = |name: &str| match name {
            "PGCHANNELBINDING" => Some("require".to_owned()),
            "PGHOST" => Some("elsewhere".to_owned()),
            "PGUSER" => Some(String::new()),
            _ => None,
        };
        let problem = Parameters::read("db", &environment).expect_err("not supported");
        assert!(problem.starts_with("PGCHANNELBINDING is \"require\", which is not supported"), "{problem}");
        let read = Parameters::read("host=here channel_binding=disable", &environment).expect("parameters");
        assert_eq!((read.get("host"), read.get("user")), (Some("here"), None));
        let read = Parameters::read("channel_binding=''", &environment).expect("parameters");
        assert_eq!((read.get("host"), read.get("channel_binding")), (Some("elsewhere"), None));
    }

    #[test]
    fn a_service_overrides_variables_but_not_the_connection_string() {
        let folder = std::env::temp_dir().join(format!("gw-service-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let file = folder.join("services.conf");
        let text = "# services\n[other]\nhost=wrong\n\n[mine]\nhost=db.example.com\nport = 6543\nuser=service\n[last]\nbad\n[odd]\nldap://x\n[typo]\nhsot=x\n";
        std::fs::write(&file, text).expect("a file");
        let path = file.display().to_string();
        let environment = |name: &str| match name {
            "PGSERVICEFILE" => Some(path.clone()),
            "PGHOST" => Some("elsewhere".to_owned()),
            "PGDATABASE" => Some("db".to_owned()),
            "PGSYSCONFDIR" => Some("/nonexistent".to_owned()),
            _ => None,
        };
        let read = Parameters::read("service=mine user=me", &environment).expect("parameters");
        let values = ["host", "port", "user", "dbname"].map(|name| read.get(name));
        assert_eq!(values, [Some("db.example.com"), Some("6543"), Some("me"), Some("db")]);
        let by_variable = |name: &str| if name == "PGSERVICE" { Some("mine".to_owned()) } else { environment(name) };
        assert_eq!(Parameters::read("", &by_variable).expect("parameters").get("user"), Some("service"));
        for (service, message) in [
            (
                "none",
                format!(
                    "service \"none\" is not defined: {path} has no section [none]; /nonexistent/pg_service.conf does not exist"
                ),
            ),
            ("last", format!("{path} line 10: expected name=value")),
            ("odd", format!("{path} line 12: LDAP services are not supported")),
            ("typo", format!("{path}: unknown parameter \"hsot\" of the service \"typo\"")),
        ] {
            let problem = Parameters::read(&format!("service={service}"), &environment).expect_err(service);
            assert!(problem.starts_with(&message), "{problem}");
        }
        let _ = std::fs::remove_dir_all(&folder);
    }
}
