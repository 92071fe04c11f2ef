#!/usr/bin/env bash
# --context-parallel-algo mesh in the scripts of a Megatron-LM checkout (a git repository or an unpacked archive):
#   scripts/apply_patches.sh CHECKOUT            apply the patch of its release
#   scripts/apply_patches.sh CHECKOUT --check    say whether it would apply, and change nothing
#   scripts/apply_patches.sh CHECKOUT --reverse  take it out again
# --patches DIR names another folder than patches/ of this project. Needs bash, git and coreutils.
# Exit code: 0 done, or nothing to do; 1 refused, nothing changed; 2 wrong usage.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
patches=$here/../patches
checkout=
mode=apply

refuse() {
  printf 'apply_patches: %s\n' "$1" >&2
  exit "${2:-1}"
}

say() { printf 'apply_patches: %s\n' "$1"; }

usage() {
  local line
  while IFS= read -r line && [[ $line != 'set '* ]]; do
    [[ $line == '# '* ]] && printf '%s\n' "${line#'# '}"
  done <"${BASH_SOURCE[0]}"
}

while (($#)); do
  case $1 in
    --check | --reverse)
      [[ $mode == apply || $mode == "${1#--}" ]] || refuse "--check and --reverse: give one of them" 2
      mode=${1#--}
      ;;
    --patches)
      (($# > 1)) || refuse "--patches: the folder is missing" 2
      patches=$2
      shift
      ;;
    -h | --help) usage && exit 0 ;;
    -*) refuse "$1: unknown option; there are --check, --reverse and --patches DIR" 2 ;;
    *)
      [[ -z $checkout ]] || refuse "one checkout at a time, got $checkout and $1" 2
      checkout=$1
      ;;
  esac
  shift
done
[[ -n $checkout ]] || { usage >&2 && exit 2; }
[[ -r $patches/releases.txt ]] || refuse "$patches: no releases.txt in it"
patches=$(cd "$patches" && pwd -P)

# The table of patches/: one row a file, in parallel arrays.
releases=() files=() before=() after=()
while read -r release file sum patched _; do
  [[ -z $release || $release == '#'* ]] && continue
  releases+=("$release") files+=("$file") before+=("$sum") after+=("$patched")
done <"$patches/releases.txt"
known=
for release in "${releases[@]}"; do
  [[ " $known " == *" core_v$release "* ]] || known+="${known:+ }core_v$release"
done
no_patch="\`torchrun ... -m megatron_mesh_cp.megatron.run PATH/pretrain_gpt.py\` needs no patch"

info=$checkout/megatron/core/package_info.py
[[ -f $info ]] || refuse "$checkout: not a Megatron-LM checkout (no megatron/core/package_info.py in it)"
checkout=$(cd "$checkout" && pwd -P)
major='' minor='' patch_level=''
while IFS= read -r line; do
  if [[ $line =~ ^(MAJOR|MINOR|PATCH)[[:space:]]*=[[:space:]]*([0-9]+) ]]; then
    case ${BASH_REMATCH[1]} in
      MAJOR) major=${BASH_REMATCH[2]} ;;
      MINOR) minor=${BASH_REMATCH[2]} ;;
      PATCH) patch_level=${BASH_REMATCH[2]} ;;
    esac
  fi
done <"$info"
[[ -n $major && -n $minor ]] || refuse "$info: cannot read the release (MAJOR, MINOR); known: $known; $no_patch"
line=$major.$minor
version=core_v$line${patch_level:+.$patch_level}
[[ " $known " == *" core_v$line "* ]] || refuse "$checkout is Megatron-LM $version; known releases: $known; $no_patch"

# What state is each of the release's files in? A file may have several rows, where the tags of a release differ.
declare -A state=() goal=()
for i in "${!releases[@]}"; do
  [[ ${releases[i]} == "$line" ]] || continue
  file=${files[i]}
  [[ -f $checkout/$file ]] || refuse "$checkout: $file is missing, so this is not the whole of $version; not touched"
  read -r sum _ < <(sha256sum <"$checkout/$file")
  if [[ $sum == "${before[i]}" ]]; then
    state[$file]=unpatched goal[$file]=${after[i]}
  elif [[ $sum == "${after[i]}" ]]; then
    state[$file]=patched goal[$file]=${before[i]}
  else
    state[$file]=${state[$file]:-other}
  fi
done
states=
for file in "${!state[@]}"; do
  [[ ${state[$file]} != other ]] ||
    refuse "$checkout/$file is not that of a known release of $version, with or without the patch: it has other \
changes, or is of a commit between releases; nothing touched. Known releases: $known; $no_patch"
  [[ " $states " == *" ${state[$file]} "* ]] || states+="${states:+ }${state[$file]}"
done
[[ $states != *' '* ]] ||
  refuse "$checkout is half patched (${!state[*]}: ${state[*]}); put those files back as released first; nothing touched"

patch_file=$patches/core_v$line.patch
names=${!state[*]}

# No repository around an unpacked archive may be taken for the checkout's own: git would then skip the files silently.
run_git_apply() {
  (cd "$checkout" && unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE &&
    GIT_CEILING_DIRECTORIES=$(dirname "$checkout") git -c core.autocrlf=false -c apply.whitespace=nowarn \
      apply --unidiff-zero "$@" "$patch_file")
}

case $mode:$states in
  check:patched) say "$version in $checkout: core_v$line.patch is applied already ($names)" ;;
  check:unpatched)
    run_git_apply --check || refuse "core_v$line.patch does not apply to $checkout"
    say "$version in $checkout: core_v$line.patch would apply ($names); nothing changed"
    ;;
  apply:patched) say "$version in $checkout: core_v$line.patch was applied already ($names); nothing changed" ;;
  reverse:unpatched) say "$version in $checkout: core_v$line.patch is not applied ($names); nothing changed" ;;
  apply:unpatched | reverse:patched)
    options=() undo=(--reverse)
    done_="applied core_v$line.patch to $names"
    [[ $mode == apply ]] || { options=(--reverse) undo=() done_="took core_v$line.patch out of $names"; }
    run_git_apply "${options[@]}" --check || refuse "core_v$line.patch does not apply to $checkout; nothing changed"
    run_git_apply "${options[@]}" --verbose >/dev/null 2>&1 || refuse "git apply of core_v$line.patch failed"
    for file in "${!goal[@]}"; do
      read -r sum _ < <(sha256sum <"$checkout/$file")
      [[ $sum == "${goal[$file]}" ]] && continue
      run_git_apply "${undo[@]}" || true
      refuse "$patch_file does not make of $file what releases.txt says; undone"
    done
    say "$version in $checkout: $done_"
    ;;
esac
