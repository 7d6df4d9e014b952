//! Circles of modules: inside a crate the modules form a line, never a circle.
//!
//! A module is a file; an inline module belongs to the file that holds it. Module A uses module B when
//! code of A names an item that B defines. Names are resolved as the compiler does, one crate at a time:
//! through `use` trees, aliases, globs, `crate`, `self`, `super` and re-exports, to the module with the
//! definition. Modules of a strongly connected component form a circle.
//!
//! Not counted as a use:
//!
//! - a `mod` declaration, a re-export, and a path that ends at a module: the names behind them count;
//! - comments, strings, and code that only tests compile;
//! - a method call: the type of its receiver is not known here.
//!
//! A module with a section [`LINE`], such as the root of a crate, lists its child modules there in a line. No
//! child uses a later one, and every child is in the list.
//!
//! [`LIMITS`] lists the crates that still have circles. A number there only becomes smaller.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::str::FromStr;

use proc_macro2::{Delimiter, Spacing, TokenStream, TokenTree};

/// Crates that may have circles, each with the number of modules in circles at most.
const LIMITS: &[(&str, usize)] = &[];

/// The heading of the section in which a module lists its child modules.
const LINE: &str = "# Rooms, from the ground up";

/// Uses that a complaint names per circle.
const SAMPLES: usize = 4;

/// Modules of one crate that use each other.
#[derive(Debug, PartialEq, Eq)]
pub struct Circle {
    /// The crate's folder below `crates/`.
    pub room: String,
    /// Paths of the modules inside the crate, sorted; `crate` is the root.
    pub modules: Vec<String>,
    /// The uses between them, one for each pair of modules.
    pub uses: Vec<Use>,
}

/// The first place where a module names an item of another.
#[derive(Debug, PartialEq, Eq)]
pub struct Use {
    pub from: String,
    pub to: String,
    /// The file of `from`, and the line in it.
    pub path: String,
    pub line: usize,
    /// The path as the code writes it.
    pub name: String,
}

/// A finding about circles.
#[derive(Debug, PartialEq, Eq)]
pub struct Complaint {
    pub path: String,
    pub line: usize,
    pub text: String,
    /// The crate is within its limit.
    pub is_allowed: bool,
}

/// Circles of all crates, judged by [`LIMITS`], and uses against the lines of modules.
pub fn judge(files: &[(String, String)]) -> Vec<Complaint> {
    let mut complaints = judge_by(files, LIMITS);
    complaints.extend(lines(files));
    complaints
}

fn judge_by(files: &[(String, String)], limits: &[(&str, usize)]) -> Vec<Complaint> {
    let mut rooms: BTreeMap<String, Vec<Circle>> = BTreeMap::new();
    for circle in circles(files) {
        rooms.entry(circle.room.clone()).or_default().push(circle);
    }
    let mut complaints = Vec::new();
    for (room, max) in limits {
        let found = modules_in(rooms.get(*room).map_or(&[], Vec::as_slice));
        if found < *max {
            let text = format!("{found} modules in circles: lower the limit of {max} in circle.rs");
            complaints.push(summary(room, text, true));
        }
    }
    for (room, circles) in &rooms {
        let found = modules_in(circles);
        let max = limits.iter().find(|(name, _)| name == room).map_or(0, |(_, max)| *max);
        let is_allowed = found <= max;
        for circle in circles {
            let modules = circle.modules.join(", ");
            let mut text = format!("circle of {} modules: {modules}", circle.modules.len());
            if !is_allowed {
                text += &format!("; the crate has {found} in circles, at most {max}");
            }
            complaints.push(summary(room, text, is_allowed));
            let shown = if is_allowed { circle.uses.len() } else { SAMPLES };
            complaints.extend(circle.uses.iter().take(shown).map(|one| Complaint {
                path: one.path.clone(),
                line: one.line,
                text: format!("circle: {} uses {} ({})", one.from, one.to, one.name),
                is_allowed,
            }));
        }
    }
    complaints
}

fn modules_in(circles: &[Circle]) -> usize {
    circles.iter().map(|circle| circle.modules.len()).sum()
}

fn summary(room: &str, text: String, is_allowed: bool) -> Complaint {
    Complaint { path: format!("crates/{room}/src"), line: 0, text, is_allowed }
}

/// The circles of every crate under `crates/`; `files` are paths from the repository's top, and texts.
pub fn circles(files: &[(String, String)]) -> Vec<Circle> {
    roots(files).into_iter().flat_map(|(room, modules)| modules.circles(room)).collect()
}

/// Complaints about the lines of modules that crates' roots and other modules list.
fn lines(files: &[(String, String)]) -> Vec<Complaint> {
    let texts: HashMap<&str, &str> =
        files.iter().map(|(path, text)| (path.as_str(), text.as_str())).collect();
    let mut complaints = Vec::new();
    for (_, modules) in roots(files) {
        for (at, module) in modules.list.iter().enumerate().filter(|(at, it)| it.file == *at) {
            let Some(line) = texts.get(module.path.as_str()).and_then(|text| listed(text)) else {
                continue;
            };
            complaints.extend(modules.against(at, &line));
        }
    }
    complaints
}

/// The modules that the head of a file lists: one or more in a line, before two spaces and a description.
fn listed(text: &str) -> Option<Vec<&str>> {
    let block = text.split_once(LINE)?.1.split_once("```text\n")?.1.split_once("```")?.0;
    let lines = block.lines().map(|line| line.trim_start_matches("//!").trim());
    let names = lines.filter_map(|line| line.split("  ").next());
    Some(names.flat_map(str::split_whitespace).collect())
}

/// Every library and program under `crates/`: its crate, and its modules.
fn roots(files: &[(String, String)]) -> Vec<(&str, Modules)> {
    let texts: HashMap<&str, &str> =
        files.iter().map(|(path, text)| (path.as_str(), text.as_str())).collect();
    let mut all = Vec::new();
    for (path, _) in files {
        let Some((room, file)) =
            path.strip_prefix("crates/").and_then(|rest| rest.split_once("/src/"))
        else {
            continue;
        };
        let is_program = file.strip_prefix("bin/").is_some_and(|name| !name.contains('/'));
        if file == "lib.rs" || file == "main.rs" || is_program {
            let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
            all.push((room, Modules::read(&texts, path, folder)));
        }
    }
    all
}

/// A file, or an inline module inside one.
struct Module {
    /// Its path inside the crate.
    name: String,
    path: String,
    /// The folder of its child modules' files.
    folder: String,
    parent: Option<usize>,
    /// The module that is the whole file: itself, unless it is inline.
    file: usize,
    children: HashMap<String, usize>,
    names: HashMap<String, Vec<Name>>,
    globs: Vec<Import>,
    /// Imports that are no re-exports.
    imports: Vec<Import>,
    mentions: Vec<Mention>,
}

/// A name in a module's scope that is no child module.
struct Name {
    is_public: bool,
    /// The path that an import stands for; none for a definition.
    import: Option<Vec<String>>,
}

struct Import {
    is_public: bool,
    path: Vec<String>,
    line: usize,
}

/// A path in code.
struct Mention {
    path: Vec<String>,
    line: usize,
    is_macro: bool,
}

/// The meaning of a path.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Target {
    Module(usize),
    /// An item that the module defines.
    Item(usize),
    /// Something of another crate.
    Outside,
}

/// The modules of one library or program; the first is the root.
struct Modules {
    list: Vec<Module>,
    /// Modules that define macros by `macro_rules`, by the macros' names.
    macros: HashMap<String, usize>,
}

impl Modules {
    fn read(texts: &HashMap<&str, &str>, path: &str, folder: &str) -> Self {
        let mut modules = Self { list: Vec::new(), macros: HashMap::new() };
        let root = modules.add("crate", path, folder, None, None);
        modules.read_file(texts, root);
        modules
    }

    fn add(
        &mut self,
        name: &str,
        path: &str,
        folder: &str,
        parent: Option<usize>,
        file: Option<usize>,
    ) -> usize {
        let at = self.list.len();
        self.list.push(Module {
            name: name.to_owned(),
            path: path.to_owned(),
            folder: folder.to_owned(),
            parent,
            file: file.unwrap_or(at),
            children: HashMap::new(),
            names: HashMap::new(),
            globs: Vec::new(),
            imports: Vec::new(),
            mentions: Vec::new(),
        });
        at
    }

    fn read_file(&mut self, texts: &HashMap<&str, &str>, at: usize) {
        // A text that is no Rust does not compile either.
        let text = texts.get(self.list[at].path.as_str()).copied().unwrap_or_default();
        let tokens = TokenStream::from_str(text).unwrap_or_default();
        self.read_tokens(texts, at, &trees(tokens), true);
    }

    /// Reads the tokens of module `at`. With `items` they are its items, else the inside of one.
    fn read_tokens(
        &mut self,
        texts: &HashMap<&str, &str>,
        at: usize,
        tokens: &[TokenTree],
        items: bool,
    ) {
        let mut is_public = false;
        let mut is_enum = false;
        let mut i = 0;
        while i < tokens.len() {
            if let Some(attribute) = attribute(tokens, i) {
                i += attribute.tokens;
                if attribute.is_test {
                    i = after_item(tokens, i);
                }
                continue;
            }
            let word = word(&tokens[i]);
            match word.as_str() {
                "" => {
                    if let TokenTree::Group(group) = &tokens[i] {
                        let is_foreign = items && i > 0 && is_literal(&tokens[i - 1]);
                        let is_body = group.delimiter() == Delimiter::Brace;
                        let mut inner = trees(group.stream());
                        if is_enum && is_body {
                            inner = without_variants(inner);
                        }
                        is_enum &= !is_body;
                        self.read_tokens(texts, at, &inner, is_foreign);
                        // The visibility `pub(crate)` holds for the item after it.
                        is_public &= group.delimiter() == Delimiter::Parenthesis;
                    } else if is_punct(&tokens[i], ';') {
                        is_public = false;
                    }
                    i += 1;
                }
                "pub" => {
                    is_public = true;
                    i += 1;
                }
                "use" if !tokens.get(i + 1).is_some_and(|next| is_punct(next, '<')) => {
                    let end = tokens[i..].iter().position(|token| is_punct(token, ';'));
                    let end = end.map_or(tokens.len(), |end| i + end);
                    self.read_use(at, &tokens[i + 1..end], &[], is_public);
                    is_public = false;
                    i = end + 1;
                }
                "mod" if items && i + 2 < tokens.len() => {
                    let name = self::word(&tokens[i + 1]);
                    self.read_mod(texts, at, &name, &tokens[i + 2]);
                    is_public = false;
                    i += 3;
                }
                "macro_rules" if i + 2 < tokens.len() => {
                    let name = self::word(&tokens[i + 2]);
                    self.macros.insert(name.clone(), self.list[at].file);
                    self.define(at, name, is_public);
                    i += 3;
                }
                _ => {
                    if items && let Some(name) = defined(tokens, i) {
                        is_enum = word == "enum";
                        self.define(at, name, is_public);
                        is_public = false;
                    }
                    i = self.read_path(at, tokens, i);
                }
            }
        }
    }

    fn define(&mut self, at: usize, name: String, is_public: bool) {
        let names = self.list[at].names.entry(name).or_default();
        names.push(Name { is_public, import: None });
    }

    /// Reads `mod name;` or `mod name { ... }`.
    fn read_mod(
        &mut self,
        texts: &HashMap<&str, &str>,
        parent: usize,
        name: &str,
        after: &TokenTree,
    ) {
        let Module { name: above, path, folder, file, .. } = &self.list[parent];
        let full = if parent == 0 { name.to_owned() } else { format!("{above}::{name}") };
        let (folder, file) = (format!("{folder}/{name}"), *file);
        if let TokenTree::Group(group) = after {
            let path = path.clone();
            let child = self.add(&full, &path, &folder, Some(parent), Some(file));
            self.list[parent].children.insert(name.to_owned(), child);
            self.read_tokens(texts, child, &trees(group.stream()), true);
            return;
        }
        let places = [format!("{folder}.rs"), format!("{folder}/mod.rs")];
        if let Some(path) = places.iter().find(|path| texts.contains_key(path.as_str())) {
            let child = self.add(&full, path, &folder, Some(parent), None);
            self.list[parent].children.insert(name.to_owned(), child);
            self.read_file(texts, child);
        }
    }

    /// Reads the inside of a `use`, or of braces in one after `prefix`.
    fn read_use(&mut self, at: usize, tokens: &[TokenTree], prefix: &[String], is_public: bool) {
        for part in tokens.split(|token| is_punct(token, ',')) {
            let Some(first) = part.first() else { continue };
            let line = line(first);
            let mut path = prefix.to_vec();
            if path.is_empty() && is_punct(first, ':') {
                path.push(String::new());
            }
            let mut alias = None;
            let mut is_done = false;
            let mut i = 0;
            while i < part.len() {
                match &part[i] {
                    TokenTree::Group(group) => {
                        self.read_use(at, &trees(group.stream()), &path, is_public);
                        is_done = true;
                    }
                    TokenTree::Punct(punct) if punct.as_char() == '*' => {
                        let import = Import { is_public, path: path.clone(), line };
                        self.list[at].globs.push(import);
                        is_done = true;
                    }
                    TokenTree::Ident(_) => match word(&part[i]).as_str() {
                        "as" => {
                            alias = part.get(i + 1).map(word);
                            break;
                        }
                        "self" if !path.is_empty() => {}
                        name => path.push(name.to_owned()),
                    },
                    _ => {}
                }
                i += 1;
            }
            if let (false, Some(last)) = (is_done, path.last()) {
                let name = alias.unwrap_or_else(|| last.clone());
                let import = Some(path.clone());
                let names = self.list[at].names.entry(name).or_default();
                names.push(Name { is_public, import });
                if !is_public {
                    self.list[at].imports.push(Import { is_public, path, line });
                }
            }
        }
    }

    /// Reads the path whose first word is token `i`; returns the place after it.
    fn read_path(&mut self, at: usize, tokens: &[TokenTree], i: usize) -> usize {
        let mut path = vec![word(&tokens[i])];
        let mut end = i + 1;
        while is_separator(tokens, end)
            && let Some(next) = tokens.get(end + 2).map(word)
            && !next.is_empty()
        {
            path.push(next);
            end += 3;
        }
        let is_macro = tokens.get(end).is_some_and(|next| is_punct(next, '!'));
        // A field, parameter or label.
        let is_field = path.len() == 1
            && path[0].starts_with(|c: char| c.is_lowercase())
            && tokens.get(end).is_some_and(|next| is_punct(next, ':'))
            && !is_separator(tokens, end);
        if begins_path(tokens, i) && !is_field {
            let line = line(&tokens[i]);
            self.list[at].mentions.push(Mention { path, line, is_macro });
        }
        end
    }

    /// The meaning of a path in module `from`; none where its first name is of no module.
    fn resolve(&self, from: usize, path: &[String], seen: &mut Seen) -> Option<Target> {
        let (first, rest) = path.split_first()?;
        let mut target = match first.as_str() {
            "" => Target::Outside,
            "crate" => Target::Module(0),
            "self" => Target::Module(from),
            "super" => Target::Module(self.list[from].parent?),
            name => self.look_up(from, from, name, rest.is_empty(), seen)?,
        };
        for (i, name) in rest.iter().enumerate() {
            let Target::Module(module) = target else { break };
            target = match name.as_str() {
                "super" => Target::Module(self.list[module].parent?),
                // A name that is found nowhere was made by a macro there.
                name => self
                    .look_up(module, from, name, i + 1 == rest.len(), seen)
                    .unwrap_or(Target::Item(module)),
            };
        }
        Some(target)
    }

    /// The meaning of a name of module `at`, as module `from` sees it; at the end of a path an item goes
    /// before a module of the same name, inside one a module does.
    fn look_up(
        &self,
        at: usize,
        from: usize,
        name: &str,
        is_last: bool,
        seen: &mut Seen,
    ) -> Option<Target> {
        if !seen.insert((at, name.to_owned(), is_last)) {
            return None;
        }
        let module = &self.list[at];
        let child = module.children.get(name).map(|child| Target::Module(*child));
        if !is_last && child.is_some() {
            return child;
        }
        let sees_all = self.is_inside(from, at);
        let names = module.names.get(name).map_or(&[][..], Vec::as_slice);
        let mut found = None;
        for name in names.iter().filter(|name| sees_all || name.is_public) {
            let target = match &name.import {
                None => Target::Item(at),
                Some(path) => self.resolve(at, path, seen).unwrap_or(Target::Outside),
            };
            let is_better = match target {
                Target::Item(_) => is_last,
                Target::Module(_) => !is_last,
                Target::Outside => false,
            };
            if is_better || found.is_none() {
                found = Some(target);
            }
        }
        if found.is_some() || child.is_some() {
            return found.or(child);
        }
        for glob in module.globs.iter().filter(|glob| sees_all || glob.is_public) {
            if let Some(Target::Module(of)) = self.resolve(at, &glob.path, seen)
                && let Some(target) = self.look_up(of, from, name, is_last, seen)
            {
                return Some(target);
            }
        }
        None
    }

    fn is_inside(&self, mut module: usize, outer: usize) -> bool {
        loop {
            if module == outer {
                return true;
            }
            let Some(parent) = self.list[module].parent else { return false };
            module = parent;
        }
    }

    /// The first use of each pair of files, by their numbers.
    fn uses(&self) -> BTreeMap<(usize, usize), (usize, String)> {
        let mut uses = BTreeMap::new();
        let mut add = |from: usize, target: Option<Target>, path: &[String], line: usize| {
            if let Some(Target::Item(to)) = target {
                let (from, to) = (self.list[from].file, self.list[to].file);
                if from != to {
                    uses.entry((from, to)).or_insert((line, path.join("::")));
                }
            }
        };
        for (at, module) in self.list.iter().enumerate() {
            let globs = module.globs.iter().filter(|glob| !glob.is_public);
            for Import { path, line, .. } in module.imports.iter().chain(globs) {
                add(at, self.resolve(at, path, &mut Seen::new()), path, *line);
            }
            for Mention { path, line, is_macro } in &module.mentions {
                let mut target = self.resolve(at, path, &mut Seen::new());
                if *is_macro && target.is_none() && path.len() == 1 {
                    target = self.macros.get(&path[0]).map(|module| Target::Item(*module));
                }
                add(at, target, path, *line);
            }
        }
        uses
    }

    /// The child of module `at` that a module is, or is in; none for a module elsewhere.
    fn child(&self, at: usize, name: &str) -> Option<String> {
        let inside = match at {
            0 => (name != self.list[0].name).then_some(name),
            _ => name.strip_prefix(&self.list[at].name).and_then(|rest| rest.strip_prefix("::")),
        };
        inside.map(|name| name.split("::").next().unwrap_or(name).to_owned())
    }

    /// Complaints about the children of module `at`, which lists them in a line.
    fn against(&self, at: usize, line: &[&str]) -> Vec<Complaint> {
        let mut complaints = Vec::new();
        let mut complain = |path: &str, line: usize, text: String| {
            complaints.push(Complaint { path: path.to_owned(), line, text, is_allowed: false });
        };
        let path = &self.list[at].path;
        let place = |name: &str| line.iter().position(|listed| *listed == name);
        let children: BTreeSet<String> =
            self.list.iter().filter_map(|module| self.child(at, &module.name)).collect();
        for name in children.iter().filter(|name| place(name).is_none()) {
            complain(path, 0, format!("module {name} is not in the list of rooms"));
        }
        for name in line.iter().filter(|name| !children.contains(**name)) {
            complain(path, 0, format!("'{name}' in the list of rooms is no module"));
        }
        for ((from, to), (at_line, name)) in self.uses() {
            let (from, to) = (&self.list[from], &self.list[to]);
            let place_of = |name: &str| place(&self.child(at, name)?);
            if let (Some(own), Some(used)) = (place_of(&from.name), place_of(&to.name))
                && own < used
            {
                let text = format!("{} uses {}, a later room ({name})", from.name, to.name);
                complain(&from.path, at_line, text);
            }
        }
        complaints
    }

    fn circles(&self, room: &str) -> Vec<Circle> {
        let uses = self.uses();
        let mut graph = vec![Vec::new(); self.list.len()];
        for (from, to) in uses.keys() {
            graph[*from].push(*to);
        }
        let mut circles = Vec::new();
        for component in components(&graph) {
            let members: BTreeSet<usize> = component.into_iter().collect();
            if members.len() < 2 {
                continue;
            }
            let mut modules: Vec<String> =
                members.iter().map(|at| self.list[*at].name.clone()).collect();
            modules.sort();
            let inside = uses
                .iter()
                .filter(|((from, to), _)| members.contains(from) && members.contains(to));
            let uses = inside.map(|((from, to), (line, name))| Use {
                from: self.list[*from].name.clone(),
                to: self.list[*to].name.clone(),
                path: self.list[*from].path.clone(),
                line: *line,
                name: name.clone(),
            });
            circles.push(Circle { room: room.to_owned(), modules, uses: uses.collect() });
        }
        circles.sort_by(|a, b| a.modules.cmp(&b.modules));
        circles
    }
}

/// Names that a search has been through, so that imports in a circle end.
type Seen = HashSet<(usize, String, bool)>;

/// Strongly connected components, by Tarjan's algorithm.
fn components(graph: &[Vec<usize>]) -> Vec<Vec<usize>> {
    struct Search<'a> {
        graph: &'a [Vec<usize>],
        /// The order in which each vertex was reached.
        order: Vec<Option<usize>>,
        /// The earliest vertex on the stack that each vertex reaches.
        low: Vec<usize>,
        stack: Vec<usize>,
        reached: usize,
        found: Vec<Vec<usize>>,
    }

    impl Search<'_> {
        fn visit(&mut self, at: usize) {
            self.order[at] = Some(self.reached);
            self.low[at] = self.reached;
            self.reached += 1;
            self.stack.push(at);
            let graph = self.graph;
            for &next in &graph[at] {
                match self.order[next] {
                    None => {
                        self.visit(next);
                        self.low[at] = self.low[at].min(self.low[next]);
                    }
                    Some(order) if self.stack.contains(&next) => {
                        self.low[at] = self.low[at].min(order);
                    }
                    Some(_) => {}
                }
            }
            if self.order[at] == Some(self.low[at])
                && let Some(from) = self.stack.iter().position(|vertex| *vertex == at)
            {
                self.found.push(self.stack.split_off(from));
            }
        }
    }

    let count = graph.len();
    let mut search = Search {
        graph,
        order: vec![None; count],
        low: vec![0; count],
        stack: Vec::new(),
        reached: 0,
        found: Vec::new(),
    };
    for at in 0..count {
        if search.order[at].is_none() {
            search.visit(at);
        }
    }
    search.found
}

fn trees(tokens: TokenStream) -> Vec<TokenTree> {
    tokens.into_iter().collect()
}

/// The word that a token is; empty for any other token.
fn word(token: &TokenTree) -> String {
    let TokenTree::Ident(ident) = token else { return String::new() };
    let word = ident.to_string();
    word.strip_prefix("r#").map_or(word.clone(), str::to_owned)
}

fn line(token: &TokenTree) -> usize {
    token.span().start().line
}

fn is_punct(token: &TokenTree, char: char) -> bool {
    matches!(token, TokenTree::Punct(punct) if punct.as_char() == char)
}

fn is_literal(token: &TokenTree) -> bool {
    matches!(token, TokenTree::Literal(_))
}

/// Tokens `i` and the next are `::`.
fn is_separator(tokens: &[TokenTree], i: usize) -> bool {
    let is_first = |token: &TokenTree| match token {
        TokenTree::Punct(punct) => punct.as_char() == ':' && punct.spacing() == Spacing::Joint,
        _ => false,
    };
    tokens.get(i).is_some_and(is_first)
        && tokens.get(i + 1).is_some_and(|token| is_punct(token, ':'))
}

/// Whether the word at token `i` can begin a path: it is no method or field, no lifetime, no variable of
/// a macro, no definition, and no later part of a path.
fn begins_path(tokens: &[TokenTree], i: usize) -> bool {
    let before = |n: usize| i.checked_sub(n).map(|at| &tokens[at]);
    let Some(previous) = before(1) else { return true };
    if is_punct(previous, '.') {
        return before(2).is_some_and(|token| is_punct(token, '.'));
    }
    if is_punct(previous, '$') {
        return word(&tokens[i]) == "crate";
    }
    let is_later = i > 1 && is_separator(tokens, i - 2);
    !is_later && !is_punct(previous, '\'') && word(previous) != "fn"
}

/// The name that a keyword at token `i` defines.
fn defined(tokens: &[TokenTree], i: usize) -> Option<String> {
    const KEYWORDS: &[&str] =
        &["fn", "struct", "enum", "union", "trait", "type", "static", "const"];
    if !KEYWORDS.contains(&word(&tokens[i]).as_str()) {
        return None;
    }
    let next = tokens.get(i + 1).map(word)?;
    let name = if next == "mut" { tokens.get(i + 2).map(word)? } else { next };
    let is_name = !name.is_empty() && !["fn", "unsafe", "extern", "async"].contains(&name.as_str());
    is_name.then_some(name)
}

/// The inside of an enum without the names of its variants, which are no uses of items named alike.
fn without_variants(tokens: Vec<TokenTree>) -> Vec<TokenTree> {
    let mut is_name = true;
    let mut kept = Vec::new();
    for token in tokens {
        if !word(&token).is_empty() && is_name {
            is_name = false;
            continue;
        }
        is_name |= is_punct(&token, ',');
        kept.push(token);
    }
    kept
}

struct Attribute {
    /// Tokens of it.
    tokens: usize,
    /// The item after it is compiled only for tests.
    is_test: bool,
}

/// The attribute at token `i`.
fn attribute(tokens: &[TokenTree], i: usize) -> Option<Attribute> {
    if !is_punct(&tokens[i], '#') {
        return None;
    }
    let inner = usize::from(tokens.get(i + 1).is_some_and(|token| is_punct(token, '!')));
    let Some(TokenTree::Group(group)) = tokens.get(i + 1 + inner) else { return None };
    let content = trees(group.stream());
    let is_test = match &content[..] {
        [cfg, TokenTree::Group(group)] if word(cfg) == "cfg" => is_test(&trees(group.stream())),
        _ => false,
    };
    Some(Attribute { tokens: 2 + inner, is_test })
}

/// Whether a condition of `cfg` holds only in tests.
fn is_test(condition: &[TokenTree]) -> bool {
    match condition {
        [test] => word(test) == "test",
        [all, TokenTree::Group(group)] if word(all) == "all" => {
            trees(group.stream()).split(|token| is_punct(token, ',')).any(is_test)
        }
        _ => false,
    }
}

/// The place after the item, statement or field that begins at token `i`.
fn after_item(tokens: &[TokenTree], mut i: usize) -> usize {
    const ITEMS: &[&str] =
        &["fn", "struct", "enum", "union", "trait", "impl", "mod", "use", "type", "static"];
    let mut is_item = false;
    while i < tokens.len() {
        let token = &tokens[i];
        is_item |= ITEMS.contains(&word(token).as_str());
        i += 1;
        let is_body =
            matches!(token, TokenTree::Group(group) if group.delimiter() == Delimiter::Brace);
        if is_body || is_punct(token, ';') || (is_punct(token, ',') && !is_item) {
            break;
        }
    }
    i
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(files: &[(&str, &str)]) -> Vec<(String, String)> {
        let file =
            |(path, text): &(&str, &str)| (format!("crates/room/src/{path}"), (*text).to_owned());
        files.iter().map(file).collect()
    }

    /// The modules of each circle.
    fn found(list: &[(&str, &str)]) -> Vec<Vec<String>> {
        circles(&files(list)).into_iter().map(|circle| circle.modules).collect()
    }

    #[test]
    fn circle_is_found_with_its_uses() {
        let list = files(&[
            ("lib.rs", "mod a;\nmod b;\nmod c;\n"),
            ("a.rs", "//! A.\nuse crate::b::B;\npub struct A(B);\n"),
            ("b.rs", "pub struct B;\nfn f() {\n    let a = super::a::A::new();\n}\n"),
            ("c.rs", "use crate::{a::A, b::B};\nfn f(_: A, _: B) {}\n"),
        ]);
        let [circle] = &circles(&list)[..] else { panic!("no circle") };
        assert_eq!(circle.room, "room");
        assert_eq!(circle.modules, ["a", "b"]);
        let places: Vec<(&str, usize, &str)> =
            circle.uses.iter().map(|u| (u.path.as_str(), u.line, u.name.as_str())).collect();
        assert_eq!(
            places,
            [
                ("crates/room/src/a.rs", 2, "crate::b::B"),
                ("crates/room/src/b.rs", 3, "super::a::A::new")
            ]
        );
    }

    #[test]
    fn line_of_modules_is_no_circle() {
        let root = "mod a;\nmod b;\nmod c;\n";
        let (a, c) = ("pub struct A;\n", "use super::b::{self, B};\nfn f(_: B) -> b::Other {}\n");
        let b = "use crate::a::{self, A};\npub struct B(A, a::A);\npub struct Other;\n";
        assert!(found(&[("lib.rs", root), ("a.rs", a), ("b.rs", b), ("c.rs", c)]).is_empty());
    }

    #[test]
    fn reexport_leads_to_its_definition() {
        let root = "mod error;\nmod a;\npub use error::Result;\npub use a::{A as First, f};\n";
        let a = "use crate::Result;\npub struct A;\npub fn f() -> Result<()> {}\n";
        // Only the definition that the re-export stands for decides.
        let line = "pub type Result<T> = core::result::Result<T, u8>;\n";
        assert!(found(&[("lib.rs", root), ("error.rs", line), ("a.rs", a)]).is_empty());
        let circle = "pub type Result<T> = core::result::Result<T, crate::First>;\n";
        let circle = found(&[("lib.rs", root), ("error.rs", circle), ("a.rs", a)]);
        assert_eq!(circle, [["a", "error"]]);
    }

    #[test]
    fn parent_and_child_form_a_circle_only_by_code_of_both() {
        let child = "use super::Parent;\npub struct Child(Parent);\npub fn make() {}\n";
        let plain = "mod child;\npub use child::{Child, make};\npub struct Parent;\n";
        assert!(found(&[("lib.rs", plain), ("child/mod.rs", child)]).is_empty());
        for code in [
            "fn f(_: Child) {}\n",
            "fn f() {\n    make();\n}\n",
            "fn f() {\n    child::make();\n}\n",
            "fn f() {\n    println!(\"{:?}\", Child);\n}\n",
        ] {
            let root = format!("{plain}{code}");
            let circle = found(&[("lib.rs", &root), ("child/mod.rs", child)]);
            assert_eq!(circle, [["child", "crate"]], "{code}");
        }
        let variants = format!(
            "{plain}enum E {{\n    /// A.\n    #[a(b)]\n    Child {{ a: u8 }},\n    make(u8),\n}}\n"
        );
        assert!(found(&[("lib.rs", &variants), ("child/mod.rs", child)]).is_empty());
        let variants = format!("{plain}enum E {{\n    A(#[a] Child),\n}}\n");
        assert_eq!(found(&[("lib.rs", &variants), ("child/mod.rs", child)]).len(), 1);
        let methods = format!("{plain}fn f(a: A) {{\n    a.make(A {{ make: 1 }});\n}}\n");
        assert!(found(&[("lib.rs", &methods), ("child/mod.rs", child)]).is_empty());
    }

    #[test]
    fn comments_strings_and_test_code_are_no_use() {
        let root = "mod a;\nmod b;\n#[cfg(test)]\nmod tests;\n";
        let b = "use crate::a::A;\npub struct B(A);\n";
        let tests = "use crate::{a::A, b::B};\n";
        let with = |a: &str| {
            let a = format!("pub struct A;\n{a}");
            !found(&[("lib.rs", root), ("a.rs", &a), ("b.rs", b), ("tests.rs", tests)]).is_empty()
        };
        assert!(with("fn f(_: crate::b::B) {}\n"));
        assert!(with("#[cfg(not(test))]\nfn f(_: crate::b::B) {}\n"));
        for a in [
            "// crate::b::B\n/* crate::b::B */\n/// [`crate::b::B`]\nfn f() {}\n",
            "const X: &str = \"crate::b::B\";\nconst Y: &str = r#\"crate::b::B\"#;\n",
            "#[cfg(test)]\nmod tests {\n    use crate::b::B;\n}\n",
            "#[cfg(test)]\nuse crate::b::B;\n",
            "#[cfg(all(test, unix))]\n#[inline]\npub fn f<T, U>(_: crate::b::B) { crate::b::g() }\n",
            "impl A {\n    #[cfg(test)]\n    fn f() {\n        crate::b::g();\n    }\n}\n",
        ] {
            assert!(!with(a), "{a}");
        }
    }

    #[test]
    fn aliases_globs_inline_modules_and_macros_are_followed() {
        let root = "#[macro_use]\nmod a;\nmod b;\npub mod prelude {\n    pub use crate::b::*;\n}\n";
        let b = "use crate::a::A;\npub struct B(A);\npub fn f() {}\n";
        let with = |a: &str| {
            let a = format!("pub struct A;\nmacro_rules! m {{ () => {{}} }}\n{a}");
            found(&[("lib.rs", root), ("a.rs", &a), ("b.rs", b)])
        };
        for a in [
            "use crate::b as other;\nfn g() {\n    other::f();\n}\n",
            "use crate::b::B as Other;\n",
            "use crate::prelude::*;\nfn g(_: B) {}\n",
            "fn g(_: crate::prelude::B) {}\n",
            "mod inner {\n    fn g() {\n        super::super::b::f();\n    }\n}\n",
            "fn g() {\n    use crate::{b::{f}};\n    f();\n}\n",
            "fn g() -> Vec<u8> {\n    vec![(1, crate::b::f())]\n}\n",
            "macro_rules! n { () => { $crate::b::f() } }\n",
        ] {
            assert_eq!(with(a), [["a", "b"]], "{a}");
        }
        assert!(with("use crate::prelude::*;\nfn g(b: std::b::B, other: std::f) {}\n").is_empty());
        let a = "macro_rules! m { () => {} }\nuse crate::b::B;\n";
        let b = "pub struct B;\nm!();\n";
        assert_eq!(found(&[("main.rs", root), ("a.rs", a), ("b.rs", b)]), [["a", "b"]]);
    }

    #[test]
    fn use_of_a_later_room_is_refused() {
        let complaints = |block: &str, b: &str| -> Vec<String> {
            let root = format!("//! {LINE}\n//!\n//! ```text\n{block}//! ```\nmod a;\nmod b;\n");
            let b = format!("pub mod c;\n{b}");
            let list = [
                ("lib.rs", root.as_str()),
                ("a.rs", "pub struct A;\n"),
                ("b.rs", &b),
                ("b/c.rs", "pub struct C(crate::a::A);\n"),
            ];
            lines(&files(&list)).into_iter().map(|complaint| complaint.text).collect()
        };
        assert!(complaints("//! a    words of a\n//! b\n", "").is_empty());
        assert!(complaints("//! a b  words\n", "struct B(c::C);\n").is_empty());
        let later = ["b::c uses a, a later room (crate::a::A)"];
        assert_eq!(complaints("//! b    words\n//! a\n", ""), later);
        assert_eq!(complaints("//! b a\n", ""), later);
        assert_eq!(complaints("//! a\n", ""), ["module b is not in the list of rooms"]);
        let no_module = ["'d' in the list of rooms is no module"];
        assert_eq!(complaints("//! a b d\n", ""), no_module);
        // The list of another module is about its children.
        let inner = |block: &str| {
            let b = format!("//! {LINE}\n//!\n//! ```text\n{block}//! ```\nmod c;\nmod d;\n");
            let list = [
                ("lib.rs", "mod b;\n"),
                ("b/mod.rs", &b),
                ("b/c.rs", "pub struct C;\n"),
                ("b/d.rs", "struct D(super::c::C);\n"),
            ];
            lines(&files(&list)).into_iter().map(|complaint| complaint.text).collect::<Vec<_>>()
        };
        assert!(inner("//! c d\n").is_empty());
        assert_eq!(inner("//! d c\n"), ["b::d uses b::c, a later room (super::c::C)"]);
        assert_eq!(inner("//! c\n"), ["module d is not in the list of rooms"]);
        // A module without a list has no line.
        assert!(lines(&files(&[("lib.rs", "mod a;\n"), ("a.rs", "")])).is_empty());
    }

    #[test]
    fn limit_holds_for_the_modules_of_a_crate() {
        let list = files(&[
            ("lib.rs", "mod a;\nmod b;\n"),
            ("a.rs", "pub struct A(crate::b::B);\n"),
            ("b.rs", "pub struct B(crate::a::A);\n"),
        ]);
        let count = |limits: &[(&str, usize)]| {
            let complaints = judge_by(&list, limits);
            let allowed = complaints.iter().filter(|complaint| complaint.is_allowed).count();
            (complaints.len() - allowed, allowed)
        };
        // One line for the circle and two for its uses.
        assert_eq!(count(&[]), (3, 0));
        assert_eq!(count(&[("room", 1)]), (3, 0));
        assert_eq!(count(&[("room", 2)]), (0, 3));
        assert_eq!(count(&[("room", 3)]), (0, 4));
        assert_eq!(count(&[("room", 2), ("gone", 2)]), (0, 4));
    }

    #[test]
    fn components_are_those_of_a_known_graph() {
        let graph = [vec![1], vec![2], vec![0, 3], vec![4], vec![5], vec![4], vec![3]];
        let mut found = components(&graph);
        found.iter_mut().for_each(|component| component.sort_unstable());
        found.sort();
        assert_eq!(found, [vec![0, 1, 2], vec![3], vec![4, 5], vec![6]]);
    }
}
