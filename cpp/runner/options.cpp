#include "options.h"

#include <limits>
#include <string_view>

#include "failure.h"
#include "number.h"

namespace runner {

const char kUsage[] = R"(usage: moepack_runner model.pte [options]

Generates greedily. Without --tokenizer the prompt is token ids on stdin, and token ids come out.

  --weights FILE      the .ptd that holds the weights, where the program keeps them apart
  --tokenizer FILE    tokenizer.json or a SentencePiece model; needs --prompt
  --prompt TEXT       what the text begins with
  --bos               put the token that begins a text before the prompt
  --max-new-tokens N  end after N tokens; otherwise with the text or the context
  --threads N         1 to 1024; otherwise as many as ExecuTorch takes
  --verify            check the checksums of packed experts while loading
  --huge-pages        copy weights to huge pages instead of mapping the file
)";

namespace {

constexpr std::int64_t kMostThreads = 1024;

struct Flag {
  std::string_view name;
  bool Options::* value;
};
constexpr Flag kFlags[] = {{"--bos", &Options::begin_text},
                           {"--verify", &Options::verify},
                           {"--huge-pages", &Options::huge_pages},
                           {"--help", &Options::help},
                           {"-h", &Options::help}};

struct Text {
  std::string_view name;
  std::string Options::* value;
};
constexpr Text kTexts[] = {
    {"--weights", &Options::weights}, {"--tokenizer", &Options::tokenizer}, {"--prompt", &Options::prompt}};

struct Number {
  std::string_view name;
  std::int64_t Options::* value;
  std::int64_t most;
};
constexpr Number kNumbers[] = {{"--max-new-tokens", &Options::max_new_tokens, std::numeric_limits<std::int64_t>::max()},
                               {"--threads", &Options::threads, kMostThreads}};

template <class Row, std::size_t count>
const Row* find(const Row (&rows)[count], const std::string& name) {
  for (const Row& row : rows)
    if (row.name == name) return &row;
  return nullptr;
}

std::int64_t value_of(const Number& option, const std::string& text) {
  const auto value = number(text);
  if (value && *value >= 1 && *value <= option.most) return *value;
  const bool bounded = option.most == kMostThreads;
  throw Failure(std::string(option.name) + " is '" + text + "'; expected a number " +
                (bounded ? "from 1 to " + std::to_string(option.most) : std::string("of at least 1")));
}

void check(const Options& options) {
  if (options.help) return;
  if (options.program.empty())
    throw Failure("no program; usage: moepack_runner model.pte [options], --help names them");
  if (options.tokenizer.empty() && !options.prompt.empty()) throw Failure("--prompt needs --tokenizer FILE");
  if (options.tokenizer.empty() && options.begin_text) throw Failure("--bos needs --tokenizer FILE");
  if (!options.tokenizer.empty() && options.prompt.empty()) throw Failure("--tokenizer needs --prompt TEXT");
}

}  // namespace

Options parse(const std::vector<std::string>& arguments) {
  Options found;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& name = arguments[i];
    if (const Flag* flag = find(kFlags, name)) {
      found.*flag->value = true;
      continue;
    }
    const Text* text = find(kTexts, name);
    const Number* option = find(kNumbers, name);
    if (text == nullptr && option == nullptr) {
      if (name.rfind("--", 0) == 0 || !found.program.empty()) throw Failure("unknown argument '" + name + "'");
      found.program = name;
      continue;
    }
    if (++i == arguments.size()) throw Failure(name + " needs a value");
    if (text != nullptr) found.*text->value = arguments[i];
    if (option != nullptr) found.*option->value = value_of(*option, arguments[i]);
  }
  check(found);
  return found;
}

}  // namespace runner
